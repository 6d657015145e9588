"""The pieces of the table, and the memory that their cases need at least.

A case is a dict of keyword arguments of the function of measures.py that the piece's kind names.
"""

import dataclasses
from typing import Any

import jax

from benchmarks import llm
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.model.lora import TARGETS, init_adapters
from ragen_jax.programs.roofline import Work
from ragen_jax.programs.shapes import bytes_per_chip
from ragen_jax.programs.training import programs
from ragen_jax.run.diagnose import DIAGNOSTICS

Case = dict[str, Any]
RANK = 16  # of adapters
CACHED, STEPS = 1024, 64  # positions before the first decoded token; decoded tokens of a row
TOKENS = 16_384  # minimum tokens of an update
LENGTHS = (16_384, 2048, 32_768)  # tokens of an update's row
MEAN = 0.3  # mean length of a reply without the limit, as a fraction of it
PROMPT, OBSERVATION = 800, 200  # tokens, as in preflight
CASES = {"full": 0, "lora": RANK}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the table that one process measures."""

    name: str
    kind: str  # name of a function of measures.py
    cases: tuple[Case, ...]
    seconds: float  # expected on an H100, an estimate: nothing has been measured yet

    @property
    def limit(self) -> float:
        """Seconds after which the process is ended."""
        return min(3 * self.seconds + 30, 590)


def decode(shape: str, seconds: float, *, rows=(8, 128, 512), cached=CACHED, steps=STEPS) -> Piece:
    """Return the piece that decodes `steps` tokens after `cached` positions.

    The largest number of rows is also decoded from int8 keys and values.
    """
    cases = tuple(
        dict(shape=shape, rows=n, cached=cached, steps=steps, cache_dtype=cache_dtype)
        for n, cache_dtype in (*((n, "model") for n in rows), (rows[-1], "int8"))
    )
    return Piece(f"decode {shape}", "decode", cases, seconds)


def update(shape: str, trained: str, seconds: float, *, lengths=LENGTHS, tokens=TOKENS) -> Piece:
    """Return the piece that trains on rows of each length.

    Args:
      trained: a key of CASES.
      tokens: minimum tokens of the micro-batch.
    """
    cases = tuple(
        dict(shape=shape, rank=CASES[trained], rows=max(1, tokens // n), length=n) for n in lengths
    )
    return Piece(f"update {shape} {trained}", "update", cases, seconds)


def step(name: str, seconds: float, *cases: Case) -> Piece:
    """Return the piece of whole steps of RL."""
    return Piece(f"step {name}", "step", tuple(PAPER | case for case in cases), seconds)


# A step of the paper's setting: 8 groups of 16 episodes, 5 turns of up to 400 tokens.
PAPER = dict(groups=8, members=16, turns=5, limit=400, rank=0, minibatches=4)
PAPER |= dict(slots=64, cache_kernel="xla")
# The public Sokoban speedrun: 128 replies of up to 4,800 tokens.
SPEEDRUN = dict(turns=1, limit=4800, rank=RANK)

# In the order of their value. The whole list should take two calls of 490 seconds on an H100.
PIECES = (
    Piece("device", "device", ({},), 10),
    update("qwen3-0.6b", "full", 30),
    update("qwen3-4b", "lora", 45),
    decode("qwen2.5-0.5b", 15),
    decode("qwen3-4b", 20),
    step("paper qwen2.5-0.5b", 90, *(dict(shape="qwen2.5-0.5b", slots=n) for n in (64, 0))),
    Piece("learning", "learning", (dict(steps=20, episodes=1024, warmstart={}),), 110),
    step("speedrun qwen3-4b", 150, dict(shape="qwen3-4b", **SPEEDRUN)),
    decode("qwen2.5-3b", 20),
    update("qwen2.5-3b", "full", 40),
    step(
        *("paper qwen2.5-3b", 200),
        *(dict(shape="qwen2.5-3b", cache_kernel=kernel) for kernel in ("xla", "pages")),
    ),
    decode("qwen3-0.6b", 15),
    update("qwen2.5-0.5b", "full", 25),
    update("qwen3-0.6b", "lora", 25),
    update("qwen2.5-3b", "lora", 35),
    update("qwen2.5-0.5b", "lora", 20),
    update("qwen3-4b", "full", 45),
)
_TINY_STEP = dict(shape="tiny", groups=2, members=2, turns=2, limit=8, minibatches=1)
_TINY_START = dict(rooms=64, success=0.0, check_every=10, check_episodes=8)  # config.warmstart
TINY = (
    Piece("device", "device", ({},), 20),
    update("tiny", "full", 20, lengths=(64, 32), tokens=64),
    update("tiny", "lora", 20, lengths=(64,), tokens=64),
    decode("tiny", 20, rows=(2, 4), cached=16, steps=4),
    step("tiny", 90, *(_TINY_STEP | dict(slots=n) for n in (2, 0))),
    Piece("learning", "learning", (dict(steps=2, episodes=32, warmstart=_TINY_START),), 150),
)


# ------------------------------------------------------------------------------ memory


def needed(kind: str, case: Case) -> float:
    """Return the bytes of the arrays that a case surely has in memory at the same time.

    Temporary arrays of a program are not counted, except for the layers' inputs that an update
    keeps for its backward pass.
    """
    return MEMORY[kind](**case) if kind in MEMORY else 0.0


def decode_memory(shape: str, rows: int, cached: int, steps: int, cache_dtype: str) -> float:
    """Return the bytes of the bfloat16 parameters and of the cache."""
    work = Work(dataclasses.replace(llm.shape(shape, "bfloat16"), cache_dtype=cache_dtype))
    return 2 * work.parameters + work.cache_bytes(rows * (cached + steps))


def update_memory(shape: str, rank: int, rows: int, length: int) -> float:
    """Return the bytes of parameters, gradient, two moments and the layers' inputs."""
    config = llm.shape(shape, "bfloat16")
    parameters = Work(config).parameters
    frozen, trained = (parameters, adapter_numbers(config, rank)) if rank else (0, parameters)
    inputs = config.layers * rows * length * config.width
    return 2 * frozen + 16 * trained + 2 * inputs


def adapter_numbers(config, rank: int) -> int:
    """Return the number of parameters of a model's adapters."""
    adapters = jax.eval_shape(
        lambda key: init_adapters(config, key, rank=rank, targets=TARGETS), jax.random.key(0)
    )
    return sum(x.size for x in jax.tree.leaves(adapters))


def step_memory(**case: Any) -> float:
    """Return the bytes of the fullest program of a step: its arguments and all arrays at rest."""
    config = step_config(**case)
    config.model.path, config.model.dtype = f"Qwen/{case['shape']}", "bfloat16"
    devices = jax.devices("cpu")[:1]
    plan = programs(
        load_config(config, devices=devices),
        devices,
        [d.programs for d in DIAGNOSTICS.values() if d.programs],
        prompt_tokens=PROMPT,
        observation_tokens=OBSERVATION,
    )
    return max(bytes_per_chip((program.arguments, program.resident)) for program in plan)


MEMORY = {"decode": decode_memory, "update": update_memory, "step": step_memory}


def step_config(
    *,
    groups: int,
    members: int,
    turns: int,
    limit: int,
    rank: int,
    slots: int,
    cache_kernel: str,
    minibatches: int,
    **_: Any,
):
    """Return the config of a run of three steps, without its model.

    Args:
      slots: episodes that are sampled at a time; 0: all, in lock step.
    """
    config = sokoban.get_config("llm")
    config.steps = 3  # programs may compile in the first two
    config.env.max_turns, config.rollout.max_new_tokens = turns, limit
    config.rollout.groups, config.rollout.group_size = groups, members
    config.rollout.slots, config.rollout.save_every = slots, 0
    config.rollout.cache_kernel = cache_kernel
    config.model.lora.rank, config.optimizer.minibatches = rank, minibatches
    config.filter.strategy = "none"  # replies are noise: every step learns from all of them
    config.stopping.variance.action = "off"
    config.eval.every = config.checkpoint.every = config.report.every = 0
    config.checkpoint.export, config.log.trackers = False, ()
    return config


def split(piece: Piece, memory: float | None) -> tuple[Piece, list[Case]]:
    """Return the piece with the cases that fit, and rows of the others.

    Args:
      memory: bytes that the device lets a process use; None: unknown.
    """
    fits, refused = [], []
    for case in piece.cases:
        need = needed(piece.kind, case) if memory else 0.0
        if memory and need > memory:
            sizes = f"{need / 2**30:.1f} GiB at least; the device has {memory / 2**30:.1f} GiB"
            refused.append(case | {"refused": f"needs {sizes}"})
        else:
            fits.append(case)
    return dataclasses.replace(piece, cases=tuple(fits)), refused
