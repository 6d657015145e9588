"""console_streams.py: a closed, full or oddly encoded console ends no command."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest
from cli_commands import ROOT
from hostile_texts import HOSTILE, raw_characters

from ragen_jax.storage.console_streams import show, show_line

pytestmark = pytest.mark.fast
BEGIN = """
import sys, os, warnings, logging
from ragen_jax.storage.console_streams import set_up_console, take_failures, show
set_up_console()
set_up_console()
"""
SPEAK = """
for stream in (sys.stdout, sys.stderr):
    print("a" * 100_000, file=stream, flush=True)
show("shown"); show("shown", error=True)
warnings.warn("warned")
logging.getLogger("a").error("logged")
from tqdm import tqdm
for _ in tqdm(range(3)): tqdm.write("written")
sys.stdout.buffer.write(b"bytes")
os.write(report := os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), repr(take_failures()).encode())
os.close(report)
sys.exit(7)
"""


def run(code, redirection="", *, tmp_path, **environment):
    """(process, text of the file `told`) of Python code run under a shell's redirection."""
    reported = tmp_path / "told"
    finished = subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, "-c", code, str(reported)],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )
    return finished, reported.read_text() if reported.exists() else ""


FULL, BAD = "No space left on device", "Bad file descriptor"
REDIRECTIONS = {  # redirection -> the streams that cannot be written, and why
    "": [],
    ">/dev/full": [("output", FULL)],
    ">/dev/full 2>&1": [("output", FULL), ("error", FULL)],
    "2>/dev/full": [("error", FULL)],
    "1>&-": [],
    "2>&-": [],
    "0<&- 1>&- 2>&-": [],
    "1</dev/null": [("output", BAD)],
    "1</dev/null 2</dev/null": [("output", BAD), ("error", BAD)],
    "</dev/null >/dev/null 2>/dev/full": [("error", FULL)],
}


@pytest.mark.medium
@pytest.mark.parametrize("redirection", REDIRECTIONS)
def test_a_console_that_cannot_be_written_ends_nothing(redirection, tmp_path):
    done, reported = run(BEGIN + SPEAK, redirection, tmp_path=tmp_path)
    assert done.returncode == 7, done.stderr
    expected = [
        f"standard {stream} cannot be written ({why}); its output is lost"
        for stream, why in REDIRECTIONS[redirection]
    ]
    assert reported == repr(expected)
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    if redirection == ">/dev/full":  # reported once on the stream that still works
        assert done.stderr.count(b"warning: standard output cannot be written (No space left") == 1


def test_a_pipe_that_is_closed_ends_nothing_and_is_no_warning(tmp_path):
    done, reported = run(BEGIN + SPEAK, "| head -c 10; exit ${PIPESTATUS[0]}", tmp_path=tmp_path)
    assert (done.returncode, done.stdout) == (7, b"a" * 10)
    assert "Broken pipe" in reported and reported.count("cannot be written") == 1
    assert b"Traceback" not in done.stderr and b"cannot be written" not in done.stderr


def test_what_is_printed_to_a_closed_output_is_in_no_file(tmp_path):
    code = BEGIN + "file = open(sys.argv[1], 'w'); print('lost'); os.write(1, b'lost')"
    done, reported = run(code, "0<&- 1>&-", tmp_path=tmp_path)
    assert (done.returncode, reported) == (0, "")


def test_a_console_of_another_encoding_shows_escapes(tmp_path):
    code = BEGIN + "print('推理 \\ud800 é'); show('推理 \\x1b é'); print('推', file=sys.stderr)"
    done, _ = run(code, tmp_path=tmp_path, PYTHONIOENCODING="latin-1", PYTHONUTF8="0")
    line = "\\u63a8\\u7406 \\ud800 é\n\\u63a8\\u7406 \\x1b é\n"
    assert (done.returncode, done.stdout) == (0, line.encode("latin-1"))
    assert done.stderr == b"\\u63a8\n"


def test_libraries_and_tracebacks_print_nothing_raw(tmp_path):
    """Every hostile text at once, through every way to print."""
    code = BEGIN + (
        "sys.path.insert(0, 'tests'); from hostile_texts import HOSTILE\n"
        "for text in [t for t in HOSTILE.values() if len(t) < 10_000]:\n"
        "    print(text); sys.stderr.write(text + '\\n'); show(text)\n"
        "    logging.getLogger('a').error('%s', text)\n"
        "    warnings.warn(text.replace(chr(0), ''))\n"
        "raise ValueError(''.join(t for t in HOSTILE.values() if len(t) < 10_000))\n"
    )
    done, _ = run(code, tmp_path=tmp_path)
    assert done.returncode == 1 and b"ValueError: " in done.stderr
    for shown in (done.stdout, done.stderr):
        assert len(shown) > 10_000 and not raw_characters(shown.decode())


@pytest.mark.medium
@pytest.mark.parametrize("name", HOSTILE)
def test_lines_of_a_command_are_printable_wherever_they_go(name, capsys):
    """The same for streams that other code has put in place, as a notebook does."""
    show(f"a {HOSTILE[name]}")
    show_line("warning", HOSTILE[name])
    out, err = capsys.readouterr()
    assert out.startswith("a ") and not raw_characters(out + err)
    assert err.startswith("warning: ") and err.count("\n") == 1
    assert max(map(len, out.split("\n"))) < 50_000


def test_a_terminal_has_progress_bars_and_no_other_commands(tmp_path):
    code = BEGIN + (
        "from tqdm import tqdm\n"
        "for i in tqdm(range(2), mininterval=0):\n"
        "    tqdm.write(f'line {i}'); print('\\x1b[31m\\x1b[2J')"
    )
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=child, cwd=ROOT)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 1000)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(parent)
    assert process.wait() == 0
    assert b"\r  0%|" in shown and b"\r" + b" " * 59 + b"\rline 1\r\n" in shown
    assert b"\\x1b[2J" in shown and b"\x1b" not in shown
