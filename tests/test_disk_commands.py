"""Commands on a disk that is full, has no inodes, or is read-only: one line, exit code 4."""

import contextlib
import errno
import json
import os
import shutil
import subprocess

import pytest
from cli_commands import call
from simulated_runs import write_run

pytestmark = pytest.mark.filterwarnings("ignore:.*(sys.modules|load_module)")
KINDS = {"full": "No space left", "inodes": "No space left", "read-only": "Read-only file system"}


@pytest.fixture(params=KINDS)
def refusing(request, tmp_path):
    """make(prepare) -> (folder on a disk that now refuses writes, its error message).
    prepare(folder) writes the files that exist before the disk refuses."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o"]
    words = [*mount, "size=4m,nr_inodes=400", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")

    def make(prepare=lambda folder: None):
        prepare(folder)
        with contextlib.suppress(OSError):
            if request.param == "full":
                with (folder / "filler").open("wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 4096)
            while request.param == "inodes":
                (folder / f"filler{os.statvfs(folder).f_ffree}").touch()
        if request.param == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        return folder, KINDS[request.param]

    yield make
    subprocess.run(["umount", "-l", str(folder)], check=True)


def assert_refused(answer, reason):
    code, _, errors = answer
    assert code == 4, errors
    assert reason in one_line(errors), errors


def one_line(errors):
    """Return the single error line of stderr; on a busy machine, progress lines may precede it."""
    *progress, last = errors.splitlines()
    assert not any("Traceback" in line or "rror" in line for line in progress), errors
    assert last.startswith("error: "), errors
    return last


@pytest.mark.parametrize("command", ["ragen_jax.report", "ragen_jax.plot"])
def test_a_page_and_a_picture(command, refusing, tmp_path):
    folder, reason = refusing()
    run = write_run(tmp_path / "run", steps=5)
    words = [f"--out={folder}/out.html"]
    if command == "ragen_jax.plot":
        words = [f"--out={folder}/out.png", "--metric=collapse/first_turn/own_margin"]
    assert_refused(call(command, str(run), *words), reason)


@pytest.fixture(scope="module")
def trained(agent, tmp_path_factory):
    """The folder of a run of two steps."""
    run = tmp_path_factory.mktemp("trained") / "run"
    fields = {
        "model.path": agent.directory,
        "steps": 2,
        "eval.episodes": 16,
        "rollout.groups": 2,
        "checkpoint.disk_retry_seconds": 0,
    }
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    code, out, errors = call("ragen_jax.train", f"--workdir={run}", "--config=sokoban", *words)
    assert code == 0, out + errors
    return run


@pytest.mark.medium
@pytest.mark.parametrize("command", ["evaluate", "export", "score"])
def test_a_trained_run(command, trained, refusing, tmp_path):
    """What the command writes outside of the run, and in the folder of a run on the disk."""
    folder, reason = refusing()
    if command == "score":
        words = [f"--model={trained}/policy", f"--rollouts={trained}/rollouts"]
    else:
        words = [f"--workdir={trained}"]
    words += {
        "evaluate": [f"--out={folder}/figures.json", "--config.eval.episodes=16"],
        "export": [f"--out={folder}/exported"],
        "score": [f"--out={folder}/scores.json"],
    }[command]
    assert_refused(call(f"ragen_jax.{command}", *words), reason)
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in written if "filler" not in path.name]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # as on stderr
def test_an_index(refusing, tmp_path):
    folder, reason = refusing()
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"contents": "two words"}\n' * 10)
    words = ["build", f"--corpus={corpus}", f"--index={folder}/index"]
    assert_refused(call("ragen_jax.retriever", *words), reason)


def test_data_for_a_cache(refusing, tmp_path, monkeypatch):
    folder, reason = refusing()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    rows = [
        {
            "type": "GSM_Rephrased",
            "query": f"What is {index} + {index}?",
            "original_question": f"How much is {index} twice?",
            "response": f"The answer is: {2 * index}",
        }
        for index in range(40)
    ]
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(rows))
    words = ["--config=metamathqa", f"--config.env.options.path={path}"]
    assert_refused(call("ragen_jax.check_data", *words), reason)


def test_a_tiny_agent_for_a_cache(refusing, monkeypatch):
    folder, reason = refusing()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    words = [
        "--config=sokoban",
        "--config.checkpoint.disk_retry_seconds=0",
        "--config.warmstart.rooms=64",
    ]
    assert_refused(call("ragen_jax.warmstart", *words), reason)


def test_a_run_that_cannot_have_its_folder(refusing):
    folder, reason = refusing()
    words = [f"--workdir={folder}/run", "--config.checkpoint.disk_retry_seconds=0"]
    code, out, errors = call("ragen_jax.train", *words)
    assert_refused((code, out, errors), f"({reason}")
    assert errors.endswith("; no step is saved\n")


def test_the_pages_of_the_laboratory(refusing, monkeypatch):
    from ragen_jax.lab import pages

    def prepare(folder):
        (folder / "mechanism.jsonl").write_text("{}\n")

    monkeypatch.setattr("ragen_jax.lab.recorded.read_runs", lambda path: {"a": []})
    drawn = type("Page", (), {"draw": lambda runs, picture: _figure(picture)})
    monkeypatch.setattr(pages, "PAGES", dict.fromkeys(pages.PAGES, drawn))
    folder, reason = refusing(prepare)
    assert_refused(call("ragen_jax.lab", "pages", f"--report={folder}"), reason)


def _figure(picture):
    from ragen_jax.storage.writers import save_figure

    figure = type("Figure", (), {"savefig": lambda self, file, **_: file.write(b"x" * 9000)})
    save_figure(figure(), picture, dpi=1)


# ------------------------------------------------------------------------------ caches


@pytest.mark.parametrize("name", ["EPERM", "EACCES", "ENOENT", "ENOTDIR", "ELOOP", "ENAMETOOLONG"])
def test_a_cache_that_cannot_be_made(name, tmp_path, monkeypatch):
    """Errors that the system raises for root are real; the others are injected."""
    cache, reason = tmp_path / "cache", os.strerror(getattr(errno, name))
    if name == "ENOTDIR":
        cache.touch()
    elif name == "ELOOP":
        cache.symlink_to(cache)
    elif name == "ENAMETOOLONG":
        cache = tmp_path / ("a" * 300)
    else:
        real = os.mkdir

        def mkdir(path, *arguments, **words):
            if str(path).startswith(str(cache)):
                raise OSError(getattr(errno, name), reason, str(path))
            return real(path, *arguments, **words)

        monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    words = ["--config=sokoban", "--config.checkpoint.disk_retry_seconds=0"]
    code, _, errors = call("ragen_jax.warmstart", *words)
    expected = 2 if name in ("ENOTDIR", "ELOOP", "ENAMETOOLONG") else 4
    assert code == expected, errors
    assert one_line(errors).endswith((reason, f"({reason})"))
