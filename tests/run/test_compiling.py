"""A line now and then while programs compile."""

import jax
import jax.numpy as jnp

from ragen_jax.run import compiling


def compile_one(size):
    """What no other test compiles."""
    jax.jit(lambda x: jnp.cumsum(x * size)[:: size % 7 + 1])(jnp.ones(size)).block_until_ready()


def test_what_compiles_is_told_now_and_then(monkeypatch, capsys):
    with compiling.told_of_compiling():
        compile_one(1031)
        assert "compiling" not in capsys.readouterr().out
        monkeypatch.setattr(compiling, "EVERY", 0.0)
        compile_one(1033)
        lines = [line for line in capsys.readouterr().out.splitlines() if "compiling: " in line]
        assert lines[-1].endswith(" s") and " programs so far, " in lines[-1]
        numbers = [int(line.split()[1]) for line in lines]
        assert numbers == sorted(set(numbers)) and numbers[0] > 1  # the first one counts
    compile_one(1039)
    assert "compiling" not in capsys.readouterr().out  # nobody wants to know
