"""The fields of base.py: accepted values, and fields that are set but that a run does not read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_jax import train
from ragen_jax.config.build_environment import build_environment
from ragen_jax.config.check import check
from ragen_jax.config.fields import FIELDS, field, leaves, unused_fields, warning
from ragen_jax.configs import bandit, base, countdown, mixture, sokoban, sudoku
from ragen_jax.model.weights import WEIGHTS
from ragen_jax.storage.metrics_reader import read_metrics

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")

# Type of a field's default -> values of other types, not finite or too large.
BAD = {
    int: (True, 1.5, NAN, "1", None, 10**30, -(10**30)),
    float: (True, NAN, INF, -INF, "0.1", None, 1e30, -1e30),
    bool: (1, 0.0, "True", None),
    str: ("no such name", "", 5, True, None),
    tuple: (5, "q", None, (NAN,), ("no such name",)),
    dict: (5, None, "x"),
}
# Field -> values just outside its bounds, and values that earlier versions accepted.
BEYOND = {
    "seed": (-1, 2**29),
    "steps": (-1, 10**6 + 1),
    "model.path": ("  ",),
    "model.lora.rank": (-1, 1025),
    "model.lora.alpha": (0.0, -1.0),
    "model.lora.targets": ((), ("q", "x"), (5,)),
    "env.window": (0,),
    "env.max_context": (-1,),
    "env.pool": (-1, 10**12),
    "env.max_turns": (0, 1001),
    "env.actions_per_turn": (0,),
    "env.max_actions": (0,),
    "env.format_penalty": (0.1,),
    "rollout.groups": (0, 10**6),
    "rollout.group_size": (0, 10**6),
    "rollout.temperature": (0.0, -1.0, 100.5),
    "rollout.max_new_tokens": (0, 10**6),
    "rollout.save_every": (-1,),
    "rollout.stop": (("",), (5,), "</answer>"),
    "collect.max_rounds": (0,),
    "collect.explore": (0.0, 1.5),
    "collect.explore_least": (0.0, 1.5),
    "filter.value": (-0.1,),
    "filter.eps": (-0.1,),
    "filter.top_members": (-1,),
    "filter.bottom_members": (-1,),
    "reward.overlong_buffer": (-1,),
    "algorithm.gamma": (0.0, 1.1),
    "algorithm.lam": (-0.1, 1.1),
    "algorithm.turn_gamma": (0.0, 1.1),
    "algorithm.clip_low": (-5.0, 1.1),
    "algorithm.clip_high": (-0.1,),
    "algorithm.clip_c": (-3.0,),
    "algorithm.kl_coef": (-0.001,),
    "algorithm.kl_target": (-0.1,),
    "algorithm.kl_gain": (-0.1, 5.0),
    "algorithm.entropy_coef": (-0.001,),
    "algorithm.balance_coef": (-0.001,),
    "algorithm.entropy_gate": (-0.1, 1.0),
    "algorithm.zvp_coef": (-0.1,),
    "algorithm.virtual_rewards": (-1, 1001),
    "algorithm.imitate_every": (-1,),
    "algorithm.mismatch_cap": (-1.0,),
    "lab.sampler_noise": (-0.1,),
    "lab.hidden_prompts": (-0.1, 1.1),
    "critic.learning_rate": (0.0, 1.5),
    "critic.clip": (0.0,),
    "critic.warmup_steps": (-1,),
    "optimizer.learning_rate": (0.0, 1.5),
    "optimizer.warmup_updates": (-1,),
    "optimizer.b1": (-0.1, 1.0, 2.0),
    "optimizer.b2": (-0.1, 1.0),
    "optimizer.eps": (0.0, 2.0),
    "optimizer.weight_decay": (-0.1,),
    "optimizer.max_grad_norm": (0.0, -1.0),
    "optimizer.minibatches": (0,),
    "optimizer.micro_batch": (0,),
    "diagnose.every": (-1,),
    "diagnose.flow_every": (-1,),
    "diagnose.scores_every": (-1,),
    "diagnose.first_turn_samples": (0, 10**6),
    "diagnose.trajectory_samples": (0, 10**6),
    "diagnose.micro_batch": (0,),
    "diagnose.tags_every": (-1,),
    "diagnose.gradients_every": (-1,),
    "diagnose.gradients_groups": (-1,),
    "diagnose.gradients_buckets": (0,),
    "diagnose.gradients_edges": ((-1.0,), (0.0, 1.0), (INF,), (True,)),
    "eval.every": (-1,),
    "log.completions": (-1, 1001),
    "eval.episodes": (0, 10**9),
    "eval.temperature": (0.0, 101.0),
    "eval.top_k": (-1,),
    "eval.top_p": (0.0, 1.1),
    "eval.min_p": (-0.1, 1.0),
    "eval.seed": (-1, 2**30),
    **{f"stopping.{rule}.patience": (0,) for rule in ("variance", "success", "empty", "nonfinite")},
    "stopping.variance.ratio": (0.0, 1.1),
    "stopping.variance.baseline": (0,),
    "stopping.success.least": (0.0, 1.1),
    "regimes.baseline": (0,),
    "regimes.tighten.every": (0,),
    "regimes.mi": (0.0, 1.1),
    "regimes.tighten.factor": (0.0, 1.1),
    "regimes.tighten.least": (0.0, 1.1),
    "report.every": (-1,),
    "checkpoint.every": (-1,),
    "checkpoint.keep": (0,),
    **{f"mesh.{axis}": (-2, 10**9) for axis in ("data", "fsdp", "tensor", "expert")},
    **{f"sampling_mesh.{axis}": (-2, 10**9) for axis in ("data", "fsdp", "tensor", "expert")},
    "sampling_mesh.devices": (-1, 10**9),
    "warmstart.seed": (-1,),
    "warmstart.width": (0, 10**9),
    "warmstart.layers": (0, 10**9),
    "warmstart.heads": (0, 10**9),
    "warmstart.kv_heads": (0, 10**9),
    "warmstart.mlp_width": (0, 10**9),
    "warmstart.rooms": (0, 10**9),
    "warmstart.plan_moves": (-1,),
    "warmstart.batch": (0, 10**9),
    "warmstart.learning_rate": (0.0, 1.5),
    "warmstart.warmup_updates": (-1,),
    "warmstart.check_every": (0,),
    "warmstart.check_episodes": (0, 10**9),
    "warmstart.success": (-0.1, 1.1),
    "warmstart.max_updates": (0,),
}
# Any text may be a name, a file or a stop string.
FREE_TEXT = ("model.path", "algorithm.kl_reference", "warmstart.demonstrations", "rollout.stop")


def put(config, name, value):
    """Set a field to a value of any type, as in an edited config.json."""
    *sections, last = name.split(".")
    for part in sections:
        config = config[part]
    with config.unlocked():
        if last in config:
            del config[last]  # a ConfigDict converts a value to the type of the old value
        config[last] = value


def refusal(config):
    with pytest.raises(ValueError) as error:
        check(config)
    return str(error.value)


# ------------------------------------------------------------------------------ values


def test_the_table_names_the_fields_of_base():
    assert set(FIELDS) == set(leaves(base.get_config()))
    for name, domain in FIELDS.items():
        for when in domain.read:
            assert set(when.names) < set(FIELDS), name
            assert name not in when.names


def bad_values():
    for name, value in leaves(base.get_config()).items():
        kind = type(value) if isinstance(value, tuple(BAD)) else dict
        for bad in (*BAD[kind], *BEYOND.get(name, ())):
            if not (name in FREE_TEXT and bad in ("no such name", ("no such name",))):
                yield name, bad


def test_bad_values_are_refused_by_name():
    tried = list(bad_values())
    assert len(tried) > 1000
    for name, value in tried:
        config = sokoban.get_config()
        put(config, name, value)
        message = refusal(config)
        assert message.startswith(f"config.{name} is {value!r}; it must be "), (name, value)
        assert "\n" not in message


def test_the_bounds_themselves_are_accepted():
    for name, values in {
        "seed": (0, 2**29 - 1),
        "env.format_penalty": (0, -1000000.0),
        "rollout.temperature": (1e-12, 100),
        "optimizer.b1": (0, 0.999999),
        "optimizer.learning_rate": (1e-12, 1),
        "algorithm.clip_low": (0, 1.0),
        "eval.seed": (0, 2**30 - 1),
        "eval.min_p": (0, 0.5),
        "model.lora.targets": (["q"], ("q", "down")),
        "diagnose.gradients_edges": ((), [1, 2.5]),
        "warmstart.success": (0, 1),
    }.items():
        for value in values:
            config = sokoban.get_config()
            put(config, name, value)
            check(config)


def test_sections_of_further_environments_have_the_entries_of_env():
    for name in ("frozen_lake", "countdown"):
        for entry, bad in bad_values():
            if entry.startswith("env."):
                config = mixture.get_config()
                put(config, f"also.{name}.{entry}", bad)
                assert refusal(config).startswith(f"config.also.{name}.{entry} is {bad!r}; it must")
    config = mixture.get_config()
    put(config, "also.countdown.groups", 0)
    assert refusal(config).startswith("config.also.countdown.groups is 0; it must be a whole")


def test_other_fields_than_those_of_base_are_refused():
    config = sokoban.get_config()
    put(config, "rollout.qqqq", 5)
    assert refusal(config) == "config.rollout.qqqq is unknown (configs/base.py lists every field)"
    config = sokoban.get_config()
    for wrong, near in (
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("env.seed", "seed or eval.seed or warmstart.seed"),
    ):
        config = sokoban.get_config()
        put(config, wrong, 5)
        hint = f"did you mean {near}? (configs/base.py lists every field)"
        assert refusal(config) == f"config.{wrong} is unknown; {hint}"
    config = sokoban.get_config()
    put(config, "rollout.kl_coeff", 5)  # a name of other tools
    assert "is unknown; here it is called --config.algorithm.kl_coef (" in refusal(config)
    config = sokoban.get_config()
    with config.unlocked():
        del config.rollout.groups
    assert refusal(config) == "config.rollout.groups is missing; configs/base.py lists every field"
    put(config, "rollout", 5)
    assert refusal(config).startswith("config.rollout.groups is missing")


COMMANDS = [  # (override, text that the line must contain)
    ("filter.value=nan", "config.filter.value is nan; it must be a number from 0"),
    ("algorithm.entropy_coef=nan", "config.algorithm.entropy_coef is nan; it must be"),
    ("optimizer.b1=2", "config.optimizer.b1 is 2.0; it must be a number from 0 to 0.999999"),
    ("eval.episodes=1000000000", "config.eval.episodes is 1000000000; it must be a whole number"),
    ("model.lora.rank=1000000000", "config.model.lora.rank is 1000000000; it must be a whole"),
    ("rollout.group_size=2.5", "config.rollout.group_size is '2.5'; it must be a whole"),
    ("filter.metric=variance", "config.filter.metric is 'variance'; it must be one of reward_va"),
    ("env.options.size=(200,200)", "config.env.options of 'sokoban': size must be a whole number"),
]


@pytest.mark.long
def test_bad_values_end_the_command_with_one_line_and_exit_code_2(tmp_path):
    def start(override):
        return subprocess.Popen(
            [sys.executable, "-m", "ragen_jax.train", f"--workdir={tmp_path}/run"]
            + [f"--config.{override}"],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    for first in range(0, len(COMMANDS), 4):  # several at a time
        some = COMMANDS[first : first + 4]
        for (_, named), process in [(command, start(command[0])) for command in some]:
            out, err = process.communicate(timeout=300)
            first_line = out == "" or out.startswith(f"{tmp_path}/run: ")
            assert process.returncode == 2 and first_line and out.count("\n") < 2, (out, err)
            (line,) = err.splitlines()
            assert line.startswith("error: ") and named in line
    assert list(tmp_path.iterdir()) == []  # neither a run nor a cache


# ------------------------------------------------------------------------------ unread fields


def names_unread(config):
    """The fields that a run of the config does not read, according to the table."""
    return set(unused_fields(config, set(FIELDS)))


def test_what_is_read_depends_on_the_config():
    tiny = names_unread(sokoban.get_config())
    ppo = names_unread(sokoban.get_config("tiny+ppo"))
    assert {"algorithm.lam", "algorithm.gamma", "critic.clip", "reward.level"} <= tiny - ppo
    assert "algorithm.turn_gamma" in ppo
    assert "algorithm.turn_gamma" not in names_unread(sokoban.get_config("tiny+bi_level_ppo"))
    assert {"filter.value", "filter.keep", "filter.mode", "filter.eps"} <= names_unread(
        sokoban.get_config("tiny+no_filter")
    )
    assert {name.removeprefix("warmstart.") for name in tiny if name.startswith("warmstart.")} == {
        *("tower_width", "fine_tune", "demonstrations", "schedule", "warmup_updates")
    }
    assert "warmstart.tower_width" not in names_unread(sokoban.get_config("tiny-vl"))
    paper = names_unread(sokoban.get_config("qwen2.5-3b"))
    warmstart = {name for name in FIELDS if name.startswith("warmstart.")}
    # Read for any model.path: a model that imitated several styles is asked which style it uses.
    assert warmstart - {"warmstart.styles", "warmstart.fine_tune"} <= paper
    small = names_unread(sokoban.get_config("smollm2-135m"))
    assert {f"warmstart.{name}" for name in ("width", "heads", "tower_layers")} <= small
    assert not {f"warmstart.{name}" for name in ("rooms", "schedule", "success")} & small
    assert "algorithm.kl_kind" in tiny - paper
    assert "env.window" in paper  # the model sees the whole history
    for name in ("seed", "optimizer.learning_rate", "env.max_turns", "filter.metric"):
        assert name not in tiny | ppo | paper


def test_the_line_names_fields_and_why():
    config = sokoban.get_config()
    names = ["algorithm.lam", "seed", "critic.clip", "env.window", "env.options.size"]
    assert warning(unused_fields(config, names)) == (
        "warning: env.window is set but not read with env.context=single_turn; "
        "algorithm.lam, critic.clip are set but not read with algorithm.name=grpo"
    )
    assert warning(unused_fields(config, ["seed", "env.options.size"])) == ""
    config = mixture.get_config()
    config.also.countdown.env.context = "window"
    names = ["also.countdown.env.window", "also.frozen_lake.env.window", "also.countdown.groups"]
    assert warning(unused_fields(config, names)) == (
        "warning: also.frozen_lake.env.window is set but not read with "
        "also.frozen_lake.env.context=single_turn"
    )


SET = {  # overrides that the default run does not read
    **{"model.lora.alpha": 16.0, "env.window": 2, "collect.explore": 1.0, "algorithm.gamma": 0.9},
    **{"collect.explore_least": 0.1, "reward.grouping": "batch", "reward.level": "token"},
    **{"algorithm.lam": 0.9, "algorithm.bi_level": True, "algorithm.turn_gamma": 0.9},
    **{"algorithm.kl_kind": "k1", "algorithm.kl_in": "reward", "algorithm.kl_gain": 0.2},
    **{"algorithm.mismatch_level": "sequence", "critic.learning_rate": 0.1, "critic.clip": 1.0},
    **{"critic.warmup_steps": 1, "diagnose.gradients_groups": 8, "regimes.tighten.factor": 0.9},
}
READ = {"seed": 1, "steps": 3, "algorithm.clip_low": 0.1, "filter.eps": 0.1, "eval.top_k": 5}


def test_the_command_warns_of_fields_that_it_does_not_read(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ragen_jax.train", f"--workdir={tmp_path}/run"]
        + [f"--config.{name}={value}" for name, value in (SET | READ).items()]
        + ["--config.warmstart.rooms=128", f"--config.model.path={tmp_path}/none"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    # only the missing model directory keeps it from training
    assert done.returncode == 2 and "no model directory" in done.stderr
    first, line = done.stdout.splitlines()
    assert first.startswith(f"{tmp_path}/run: ") and line.startswith("warning: ")
    named = {word.rstrip(",;") for word in line.split() if "." in word and "=" not in word}
    assert named == {*SET, "warmstart.rooms"} and len(named) > 15
    assert "warmstart.rooms is set but not read with model.path=" in line


def another(name, config):
    """Return a different value of the field that `check` accepts, or None."""
    old, what = field(config, name), FIELDS[name].what
    tried = [*what.removeprefix("one of ").split(", "), "q", not old if type(old) is bool else 7]
    if isinstance(old, (int, float)):
        tried += [old + 1, old / 2, old * 2, 0.25, 1, 2, 0]
    for value in (*tried, ("q",), (1.0, 2.0)):
        value = int(value) if type(old) is int and type(value) is float else value
        if FIELDS[name].accepts(value) and value != old:
            put(config, name, value)
            try:
                check(config)
                return value
            except ValueError:
                put(config, name, old)


SETTINGS = {
    # Group-relative advantages, no KL, a filter, one turn per prompt.
    "default": {},
    # No filter, diagnosis, evaluation or stopping.
    "bare": {
        **{"filter.strategy": "none", "diagnose.every": 0, "eval.every": 0},
        **{f"stopping.{r}.action": "off" for r in ("variance", "success", "empty", "nonfinite")},
        **{"algorithm.objective": "cispo", "algorithm.clip_c": 0.0},
    },
    # A critic, normalised returns, a filter that keeps all of the mass, a fixed KL coefficient.
    "ppo": {
        **{"algorithm.name": "ppo", "reward.normalize": "mean_std", "algorithm.kl_coef": 0.1},
        **{"filter.value": 1.0, "eval.every": 0, "diagnose.gradients_every": 1},
        **{"diagnose.gradients_groups": 0, "diagnose.gradients_edges": (0.5,)},
    },
    # Token credit without a critic, a pool without exploration, another filter strategy.
    "pool": {
        **{"algorithm.name": "reinforce_plus_plus", "env.pool": 6, "filter.strategy": "top_k"},
        **{"filter.value": 0.5, "diagnose.every": 0, "eval.every": 0},
    },
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    ["bare", *(pytest.param(s, marks=pytest.mark.slow) for s in ("default", "ppo", "pool"))],
)
def test_what_is_called_unread_changes_nothing(agent, tmp_path, monkeypatch, setting):
    """Two runs that differ in every unread field write the same figures and weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 2
    config.rollout.update(groups=4, group_size=4, compact=False)
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.diagnose.update(first_turn_samples=8, trajectory_samples=4, flow_every=1)
    config.eval.update(episodes=8, every=1)
    config.update_from_flattened_dict(SETTINGS[setting])
    check(config)
    twin = config.copy_and_resolve_references()
    changed = {name: another(name, twin) for name in names_unread(config)}
    changed = {name: value for name, value in changed.items() if value is not None}
    assert len(changed) >= 30, changed
    found = []
    for name, one in (("one", config), ("twin", twin)):
        assert train.train(one, tmp_path / name) == 0
        rows = [
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}
            for row in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        found.append((rows, (tmp_path / name / "policy" / WEIGHTS).read_bytes()))
    assert found[0][0] == found[1][0], changed
    assert found[0][1] == found[1][1], changed


def test_options_of_environments_are_refused_by_name():
    for module, options in (
        (sokoban, {"size": (200, 200)}),
        (sokoban, {"num_boxes": 10**9}),
        (sokoban, {"min_solution": float("nan")}),
        (countdown, {"targets": (-5, 10**12)}),
        (countdown, {"path": 5}),
        (bandit, {"arms": 10**9}),
        (sudoku, {"size": 5}),
    ):
        config = module.get_config()
        ((name, value),) = options.items()
        put(config, f"env.options.{name}", value)
        with pytest.raises(ValueError, match=rf"config.env.options of '\w+': {name} must be "):
            build_environment(config.env, "train")
