"""Messages about compiled programs: periodic lines, metrics, and warnings about late programs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.programs import monitor as compiling


def compile_one(size):
    """Compiles a program that no other test compiles."""
    jax.jit(lambda x: jnp.cumsum(x * size)[:: size % 7 + 1])(jnp.ones(size)).block_until_ready()


def test_what_compiles_is_told_now_and_then(monkeypatch, capsys):
    with compiling.monitor_compilation():
        compile_one(1031)
        assert "compiling" not in capsys.readouterr().out
        monkeypatch.setattr(compiling, "EVERY", 0.0)
        compile_one(1033)
        lines = [line for line in capsys.readouterr().out.splitlines() if "compiling: " in line]
        assert lines[-1].endswith(" s") and " programs so far, " in lines[-1]
        numbers = [int(line.split()[1]) for line in lines]
        assert numbers == sorted(set(numbers)) and numbers[0] > 1  # the first program counts
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
        assert "warning" not in capsys.readouterr().out  # no warning in the first steps
        extend(params, tokens[96], times=2.0)
        assert monitor.metrics(3)["time/compile"] > 0
        (line,) = capsys.readouterr().out.splitlines()
        told_of = "warning: recompiled after warm-up: extend (int32[96,24]) "
        assert line.startswith(told_of) and line.endswith(" s")
        extend(params, tokens[64], times=2.0)
        extend(params, tokens[64], times=3.0)
        assert monitor.metrics(4)["time/compile"] > 0
        assert not capsys.readouterr().out  # a line was printed a moment ago
        monkeypatch.setattr(compiling, "LATE_EVERY", 0.0)
        extend(params, tokens[32], times=2.0)
        monitor.metrics(5)
        (line,) = capsys.readouterr().out.splitlines()  # includes the programs since the last line
        assert line.endswith(", and 2 others") and "extend (" in line
        extend(params, tokens[32], times=2.0)
        assert monitor.metrics(6) == {"time/compile": 0.0}
    assert not capsys.readouterr().out
    assert not caplog.records  # JAX's own log messages stay hidden


def test_a_program_as_quick_as_loading_one_is_not_worth_a_line(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "WORTH_A_LINE", 1e9)
    with compiling.monitor_compilation() as monitor:
        for step in range(4):
            compile_one(1051 + 2 * step)
            assert monitor.metrics(step + 1)["time/compile"] > 0
    assert "warning" not in capsys.readouterr().out
