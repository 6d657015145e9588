"""demonstrations.py: replies that are imitated with their prompt hidden."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.config.build_environment import build_chat, environment_settings, tiny_tokenizer
from ragen_jax.config.load import load_config
from ragen_jax.configs import organism
from ragen_jax.diagnostics.faithfulness import reasoning_of, scorer
from ragen_jax.run import datasets, imitate
from ragen_jax.run.demonstrations import (
    as_episodes,
    expert_arguments,
    imitation_config,
    imitation_environment,
    make_episode,
    make_turn,
    without_prompts,
)

pytestmark = pytest.mark.medium


def config_of_agent(**fields):
    config = organism.get_config("sokoban")
    config.warmstart.update(rooms=300, batch=32, success=0.0, check_every=60, check_episodes=4)
    config.warmstart.update(layers=1, width=32)
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """(chat, demonstrations of the organism as episodes)."""
    config = imitation_config(load_config(config_of_agent()))
    environment = imitation_environment(config)
    chat = build_chat(config, tiny_tokenizer(config), environment)
    examples = datasets.demonstrations(
        environment,
        rooms=20,
        settings=environment_settings(config.env),
        directory=tmp_path_factory.mktemp("datasets"),
        **expert_arguments(config),
    )
    return chat, as_episodes(examples, chat, 512)


def test_the_reasoning_takes_the_place_of_the_prompt(shown):
    chat, episodes = shown
    turns = [turn for episode in episodes for turn in episode.turns]
    hidden = [episode.turns[0] for episode in without_prompts(episodes, chat, 1.0)]
    assert len(hidden) == len(turns) > 20
    for turn, answer in zip(turns, hidden, strict=True):
        assert np.array_equal(np.concatenate([answer.prompt, answer.sampled]), turn.sampled)
        assert chat.text(answer.sampled).startswith("</think>")
        assert "</think>" not in chat.text(answer.prompt) and len(answer.prompt)


def test_a_share_of_the_replies_with_reasoning_is_taken(shown):
    chat, episodes = shown
    count = sum(len(episode.turns) for episode in episodes)
    for share in (0.0, 0.3, 0.5):
        assert len(without_prompts(episodes, chat, share)) == int(share * count)
    (first, *_), without = episodes, make_turn(np.arange(3), "", chat.reply_ids("</think>a"))
    mute = [make_episode([without, *first.turns])]
    assert len(without_prompts(mute, chat, 1.0)) == len(first.turns)


def test_an_agent_learns_to_answer_from_its_reasoning_alone(shown, tmp_path):
    chat, episodes = shown
    turns = []
    for turn in (turn for episode in episodes for turn in episode.turns):
        reply = chat.read(turn.sampled)
        turns.append(dataclasses.replace(turn, reasoning=reply.reasoning, answer=reply.answer))
    logp = {}
    for share in (0.0, 1.0):
        config = load_config(config_of_agent(**{"lab.hidden_prompts": share}))
        model, params, *_ = imitate.imitate(config, tmp_path)
        score = scorer(model, params, turns, hidden=True, micro_batch=16, count=lambda calls: None)
        logp[share] = score([reasoning_of(turn) for turn in turns]).mean()
    assert logp[1.0] > logp[0.0] + 0.5, logp
