"""configs/organism.py: an agent with two reasoning styles, and how its style is recognised."""

import dataclasses
import re

import jax
import pytest

from ragen_jax.config.build_environment import build_environment, build_styles, tiny_words
from ragen_jax.config.check import check
from ragen_jax.configs import countdown, organism
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.styles import Style
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.tasks import build_tasks


@pytest.mark.parametrize("world", organism.WORLDS)
def test_both_worlds_teach_two_styles(world):
    config = organism.get_config(world)
    check(config)
    assert config.env.name == world
    assert list(build_styles(config, build_environment(config.env, "train"))) == [
        *("grounded", "template")
    ]
    words = tiny_words(config)
    assert " mistakes" in words and len(set(words)) == len(words)
    config.warmstart.styles = {}
    assert not build_styles(config, build_environment(config.env, "train"))
    assert " mistakes" not in tiny_words(config)


def test_recipes_follow_the_world():
    config = organism.get_config("frozen_lake+no_filter+ppo")
    assert (config.filter.strategy, config.algorithm.name) == ("none", "ppo")
    with pytest.raises(ValueError, match="unknown world 'tiny'; known: sokoban, frozen_lake"):
        organism.get_config("tiny")


def test_unusable_styles_and_probes_are_refused():
    config = organism.get_config()
    config.warmstart.styles = dict(grounded=0.5, poem=0.5)
    with pytest.raises(ValueError, match="styles has poem, but environment 'sokoban' has groun"):
        tiny_words(config)
    other = countdown.get_config()
    other.warmstart.styles = dict(silent=1.0)
    with pytest.raises(ValueError, match="styles has silent, but .* 'countdown' has no styles"):
        tiny_words(other)
    for styles in (dict(grounded=0.0), dict(grounded=1.5), dict(grounded="a")):
        config.warmstart.styles = styles
        with pytest.raises(ValueError, match="config.warmstart.styles is .* from 0 to 1, not al"):
            check(config)
    config = organism.get_config("sokoban+random_groups")
    check(config)
    config.filter.top_members = 2
    with pytest.raises(ValueError, match="at_random is True, which assigns whole groups"):
        check(config)
    config = organism.get_config()
    config.diagnose.probe_problems = 257
    with pytest.raises(ValueError, match="probe_problems is 257, but .* eval.episodes = 256"):
        check(config)


@pytest.mark.slow
def test_a_reply_that_is_begun_goes_on_as_if_the_agent_had_begun_it(agent):
    """At a low temperature the agent begins every reply with the grounded style's opening."""
    config = agent.config.copy_and_resolve_references()
    config.eval.update(episodes=256, temperature=0.001)  # enough for some success
    (task,) = build_tasks(config, agent.tokenizer, ())
    lost = Style(re.compile("x"), lambda *_: "x", ("√", "√"))
    styles = {"grounded": task.settings.environment.styles["grounded"], "lost": lost}
    task = dataclasses.replace(task, styles=styles)
    with jax.set_mesh(make_mesh(data=1, fsdp=1, tensor=1)):
        metrics, (episodes,) = evaluate(agent.model, agent.params, [task])
    begun = {agent.tokenizer.decode(turn.sampled[0]) for e in episodes for turn in e.turns}
    assert begun == {"player "}
    assert metrics["eval/style/grounded/success"] == metrics["eval/success"] > 0
    assert metrics["eval/style/grounded/success_ci95"] == metrics["eval/success_ci95"]
    # No reply begins with this symbol.
    assert metrics["eval/style/lost/success"] < metrics["eval/success"]
