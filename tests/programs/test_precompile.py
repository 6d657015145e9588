"""Programs compiled before they are needed: a run finds them, and does not wait later."""

import collections
import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared_rows import NEVER, trees

from ragen_jax import train
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.core.compilation import compiled, struct_of
from ragen_jax.diagnostics.cross_scoring import (
    ScoredReply,
    cross_score,
    cross_score_actions,
    only_compiling,
)
from ragen_jax.programs import monitor as compiling
from ragen_jax.programs import precompile
from ragen_jax.programs.precompile import PlannedProgram, Precompiler, start_programs
from ragen_jax.rollout.env_calls import begin
from ragen_jax.rollout.play import rollout
from ragen_jax.run import tasks as run_tasks
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import load_policy
from ragen_jax.update.learner import sampling_policy


@jax.jit
def cubed(x):
    return jnp.cumsum(x) ** 3


def planned(size):
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    return PlannedProgram(f"cubed {size}", lambda: compiled(cubed, x))


def names(monitor):
    return [program.name for program in monitor.programs]


def test_what_a_thread_compiles_is_there_and_only_waiting_counts(monkeypatch, capsys):
    monkeypatch.setattr(precompile, "WORTH_A_LINE", 0.0)
    rows = {size: np.ones(size, np.float32) for size in (1201, 1213, 1217, 1223)}
    with compiling.monitor_compilation() as monitor:
        precompiler = Precompiler(monitor)
        precompiler.compile_now([planned(1201), planned(1213)])
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("compiled 2 programs in ") and line.endswith(" s")
        cubed(rows[1201]), cubed(rows[1213])
        assert names(monitor) == ["precompiled programs"]  # nothing was compiled afterwards
        assert monitor.metrics(1)["time/compile"] > 0

        precompiler.begin(planned(1217))
        precompiler.wait()
        precompiler.wait()  # nothing to wait for
        monitor.metrics(2)
        assert monitor.metrics(3) == {"time/compile": 0.0}
        cubed(rows[1217])
        assert set(names(monitor)) == {"precompiled programs"}
        cubed(rows[1223])
        assert names(monitor)[-1] == "cubed"  # it was not planned
        precompiler.close()


def test_what_cannot_be_compiled_is_told_and_the_run_goes_on(capsys):
    def fail():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 byte too many\nand more")

    with compiling.monitor_compilation() as monitor:
        precompiler = Precompiler(monitor)
        precompiler.compile_now([PlannedProgram("a large one", fail), planned(1231)])
        precompiler.close()
    assert (
        "warning: a large one was not precompiled: RESOURCE_EXHAUSTED: 1 byte too many\n"
        in capsys.readouterr().out
    )


def test_cross_scoring_finds_what_was_compiled_for_it(agent):
    rng = np.random.default_rng(0)
    vocabulary = len(agent.tokenizer)
    # Lengths that no other test scores.
    prompts = [rng.integers(0, vocabulary, 150) for _ in range(3)]
    spoken = [ScoredReply(rng.integers(0, vocabulary, 70), 60, 5) for _ in range(5)]
    swapped = [(1, spoken[0]), (2, spoken[3])]
    args = prompts, spoken, swapped
    shapes = jax.tree.map(struct_of, agent.params)
    with only_compiling():
        found = cross_score_actions(agent.model, shapes, *args, micro_batch=24)
    assert [x.shape for x in found] == [(5, 3), (5, 3), (2,)] and not any(x.any() for x in found)
    with compiling.monitor_compilation() as monitor:
        real = cross_score_actions(agent.model, agent.params, *args, micro_batch=24)
        assert not {"read_prompts", "score_block"} & set(names(monitor))
        assert all((x < 0).all() for x in real)
        cross_score(agent.model, agent.params, prompts, [[1] * 130], micro_batch=24)
        assert "score_block" in names(monitor)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("groups", [9, 16])  # the second in two lanes
@pytest.mark.parametrize("context", ["single_turn", "full"])
def test_a_start_knows_the_programs_of_its_first_evaluation_and_rollout(
    agent, monkeypatch, tmp_path, context, groups
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    monkeypatch.setattr(run_tasks, "cores", lambda: 2)
    jax.clear_caches()
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.env.context = context
    config.env.max_turns = 1 if context == "full" else 2
    config.env.prompt = "terse"
    config.rollout.update(groups=groups, group_size=8)
    config.eval.update(episodes=16 * groups, top_k=7)
    config.diagnose.every = 0
    mesh, sampling_mesh = build_meshes(config)
    model, params, _, tasks = load_policy(config, tmp_path)
    learner, state = build_learner(config, model, params, mesh, sampling_mesh)
    policy = sampling_policy(learner, state)
    programs = start_programs(config, learner, state, policy, tasks)
    # Programs for 72 rows and, for the remaining rows with their own prompts, 64 rows (in lanes: 64
    # rows only); with two samplings, and for the first turns of groups.
    assert len({program.name for program in programs}) == len(programs) <= 16
    (task,) = tasks
    with compiling.monitor_compilation() as monitor:
        precompiler = Precompiler(monitor)
        precompiler.compile_now(programs)
        precompiler.close()
        with jax.set_mesh(sampling_mesh):
            evaluate(model, policy, tasks)
            rollout(
                model,
                policy,
                dataclasses.replace(task.settings, compact=True, slots=0, chunk=0),
                list(range(groups)),
                begin(task.settings.environment, list(range(groups)), task.settings.limits),
                group_size=8,
                key=task.key,
            )
        assert not {"prefill", "decode", "_episode_keys"} & set(names(monitor)), names(monitor)


@pytest.fixture
def lowered(monkeypatch):
    """{name: shapes} of the compiled programs: (compiled ahead, compiled when called)."""
    ahead, called = collections.defaultdict(set), collections.defaultdict(set)
    notice = compiling._Shapes.filter

    def seen(self, record):
        if record.msg.startswith("Compiling %s with global shapes"):
            thread = threading.current_thread().name
            programs = ahead if thread.startswith(compiling.THREAD) else called
            name = compiling._function(str(record.args[0]))
            programs[name].add(tuple(map(compiling._shape, record.args[1])))
        return notice(self, record)

    monkeypatch.setattr(compiling._Shapes, "filter", seen)
    return ahead, called


@pytest.mark.long
@pytest.mark.parametrize(
    "served",
    [
        {"env.context": "single_turn"},
        # Ratios to the update's own log-probs, a critic, and a reference in the reward.
        pytest.param(
            {
                **{"env.context": "single_turn", "optimizer.minibatches": 2},
                **{"algorithm.name": "ppo", "algorithm.objective": "gspo"},
                **{"algorithm.kl_in": "reward", "algorithm.kl_coef": 0.01},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"env.context": "full", "rollout.slots": 16}, marks=pytest.mark.slow),
    ],
)
def test_a_run_compiles_nothing_that_was_compiled_at_its_start(
    agent, monkeypatch, tmp_path, served, lowered
):
    """Rows are plain."""
    with trees(NEVER):
        ahead, called = programs_of_a_run(agent, monkeypatch, tmp_path, served, lowered)
    # Programs for shorter rows compile when they are called; none of them has longer rows.
    assert {"policy_gradient", "apply_gradient"} <= set(ahead)
    for name in ("policy_gradient", "critic_gradient", "read_micro_batches"):
        late = called.get(name, set())
        assert not late or longest(late) < longest(ahead[name]), name


@pytest.mark.long
def test_gradients_of_trees_are_not_compiled_ahead(agent, monkeypatch, tmp_path, lowered):
    """Their sizes depend on the replies. All prompts share their rules here."""
    served = {"env.context": "single_turn"}
    ahead, called = programs_of_a_run(agent, monkeypatch, tmp_path, served, lowered)
    assert "policy_gradient" in called and not {"policy_gradient", "read_micro_batches"} & set(
        ahead
    )


def programs_of_a_run(agent, monkeypatch, tmp_path, served, lowered):
    """Return {name: shapes} of the programs compiled ahead, and when called, in three steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = agent.config.copy_and_resolve_references()
    fields = {
        **{"model.path": str(agent.directory), "env.prompt": "terse", "env.max_turns": 3},
        **{"rollout.groups": 6, "rollout.group_size": 4, "rollout.max_new_tokens": 17},
        **{"optimizer.micro_batch": 4, "filter.strategy": "none", "steps": 3},
        **{"eval.episodes": 24, "diagnose.every": 0, "report.every": 0, "log.trackers": ()},
    }
    config.update_from_flattened_dict(fields | served)
    jax.clear_caches()  # a program that another test has compiled would not be in `called`
    assert train.train(config, tmp_path / "run") == 0
    ahead, called = lowered
    again = {name for name in ahead if ahead[name] & called.get(name, set())}
    assert not again, again
    rollouts = {"read", "fold", "decode_chunk", "keep_rows", "_episode_keys", "prefill", "decode"}
    assert not (rollouts | {"apply_gradient"}) & set(called), sorted(called)
    assert "token_advantages" in called  # it is not compiled ahead
    return ahead, called


def longest(programs):
    """Tokens in the longest rows of the programs' int32[A,B,T] arguments; 0 if there are none."""
    tokens = re.compile(r"int32\[\d+,\d+,(\d+)\]")
    found = [tokens.fullmatch(shape) for shapes in programs for shape in shapes]
    return max((int(match[1]) for match in found if match), default=0)
