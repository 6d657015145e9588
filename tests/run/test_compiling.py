"""A line now and then while programs compile."""

import jax
import jax.numpy as jnp

from ragen_jax.run import compiling


def test_what_compiles_is_told_now_and_then(monkeypatch, capsys):
    compiling.report_compiling()  # once a process, however often
    compiling.report_compiling()

    def compile_one(size):
        # Not what any other test compiles.
        jax.jit(lambda x: jnp.cumsum(x * size)[:: size % 7 + 1])(jnp.ones(size)).block_until_ready()

    compile_one(1031)
    assert "compiling" not in capsys.readouterr().out
    monkeypatch.setattr(compiling, "EVERY", 0.0)
    compile_one(1033)
    lines = [line for line in capsys.readouterr().out.splitlines() if "compiling: " in line]
    assert lines and lines[-1].endswith(" s") and " programs so far, " in lines[-1]
    compile_one(1033)  # which is there already
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == sorted(set(numbers))
