"""Messages about compiled programs: periodic lines, metrics, and warnings about late programs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.programs import monitor as compiling


def compile_one(size):
    """Compiles a program that no other test compiles."""
    jax.jit(lambda x: jnp.cumsum(x * size)[:: size % 7 + 1])(jnp.ones(size)).block_until_ready()


def test_what_compiles_is_told_now_and_then(monkeypatch, capsys):
    with compiling.monitor_compilation() as monitor:
        compile_one(1031)
        assert "compiling" not in capsys.readouterr().out
        monkeypatch.setattr(compiling, "EVERY", 0.0)
        compile_one(1033)
        lines = capsys.readouterr().out.splitlines()
        found = [re.fullmatch(r"compiling as needed: (\d+) programs so far, 0 s", x) for x in lines]
        numbers = [int(match[1]) for match in found]
        assert numbers == sorted(set(numbers)) and numbers[0] > 1  # the first program counts
        # Programs that threads compiled have their own line (precompile.py).
        monitor.add_wait(100.0)
        compile_one(1037)
        assert (
            capsys.readouterr()
            .out.splitlines()[-1]
            .endswith(f"{len(monitor.programs) - 1} programs so far, 0 s")
        )
    compile_one(1039)
    assert "compiling" not in capsys.readouterr().out  # not monitored


@partial(jax.jit, static_argnames="times")
def extend(params, tokens, times):
    return params["w"][tokens] * times


def test_a_row_says_what_compiled_and_a_late_program_is_named(monkeypatch, capsys, caplog):
    monkeypatch.setattr(compiling, "WORTH_A_LINE", 0.0)
    params = {"w": jnp.ones((977, 3))}
    tokens = {rows: jnp.zeros((rows, 24), jnp.int32) for rows in (128, 96, 64, 32)}
    with compiling.monitor_compilation() as monitor:
        compile_one(1049)
        seconds = monitor.metrics(0)["time/compile"]
        assert 0 < seconds == pytest.approx(sum(program.seconds for program in monitor.programs))
        extend(params, tokens[128], times=2.0)
        assert 0 < monitor.metrics(1)["time/compile"] < seconds + 60
        compile_one(1063)
        assert monitor.metrics(2)["time/compile"] > 0
        assert capsys.readouterr().out == ""  # no line in the first steps
        extend(params, tokens[96], times=2.0)
        monitor.add_wait(5.0)  # a wait is no late program
        assert monitor.metrics(3)["time/compile"] > 5
        (line,) = capsys.readouterr().out.splitlines()
        known = r"compiled extend \(int32\[96,24\]\) \d\.\d s: rows of a new padded length; "
        assert re.fullmatch(known + "expected a few times per run, nothing to do", line)
        extend(params, tokens[64], times=2.0)
        extend(params, tokens[64], times=3.0)
        assert monitor.metrics(4)["time/compile"] > 0
        assert not capsys.readouterr().out  # a line was printed a moment ago
        monkeypatch.setattr(compiling, "LATE_EVERY", 0.0)
        extend(params, tokens[32], times=2.0)
        monitor.metrics(5)
        (line,) = capsys.readouterr().out.splitlines()  # includes the programs since the last line
        assert " s and 2 others: rows " in line and "extend (" in line
        extend(params, tokens[32], times=2.0)
        assert monitor.metrics(6) == {"time/compile": 0.0}
    assert not capsys.readouterr().out
    assert not caplog.records  # JAX's own log messages stay hidden


def test_steps_that_keep_compiling_give_a_warning(monkeypatch, capsys):
    """A few late programs are those of a healthy run; a program in most steps is not."""
    monkeypatch.setattr(compiling, "LATE_EVERY", 0.0)
    monitor = compiling.CompileMonitor()
    for step in range(1, 60):
        if step % 2 or step > 40:
            monitor.add("policy_gradient", 2.2)
        monitor.metrics(step)
    lines = capsys.readouterr().out.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert len(lines) == 19 + 19 and lines.index(warnings[0]) == 19 + 9
    assert warnings == [
        "warning: 15 of the last 20 steps compiled programs, which makes them slow (time/compile): "
        "policy_gradient (same shapes) 2.2 s; with rollout.slots, all are compiled at the start"
    ]


def test_a_program_as_quick_as_loading_one_is_not_worth_a_line(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "WORTH_A_LINE", 1e9)
    with compiling.monitor_compilation() as monitor:
        for step in range(4):
            compile_one(1051 + 2 * step)
            assert monitor.metrics(step + 1)["time/compile"] > 0
    assert capsys.readouterr().out == ""
