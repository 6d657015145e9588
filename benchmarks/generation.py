"""Generation of the tiny agent against PyTorch (transformers) and Tunix, on equal work.

Whole rollouts, including environment and tokenizing on both sides. This program also returns the
log-probabilities of the sampled tokens; the others do not compute them.
"""

import os

import jax
import numpy as np

from benchmarks.episodes import tiny_setting
from benchmarks.llm import shape
from benchmarks.measure import Row, compare
from benchmarks.peers import (
    PeerMissing,
    choose_threads,
    need,
    torch_generator,
    torch_logits,
    tunix_generator,
    tunix_logits,
)
from ragen_jax.core.padding import length_bucket
from ragen_jax.model.qwen import logits

# Number of turns of each of eight groups. With SHRINKING, 128, 112, 96, 80 and 64 episodes play.
FIVE = (5,) * 8
SHRINKING = (1, 2, 3, 4, 5, 5, 5, 5)
ONE = (1,) * 8


def rollout_full(repeats, *, turns=FIVE, members=16):
    """Five turns with full history: a kept cache, against torch, which prefills every turn."""
    return [_against_torch("full history", repeats, "full", turns, members, target=3)]


def rollout_single(repeats, *, turns=SHRINKING, members=16):
    """Single-turn context with a shrinking batch, and one turn of all episodes, against torch."""
    return [
        _against_torch("single turns, batch shrinks", repeats, "single_turn", turns, members, 1.2),
        _against_torch("one turn of all", repeats, "single_turn", ONE[: len(turns)], members),
    ]


def rollout_05b(repeats, *, name="qwen2.5-0.5b", turns=(5, 5), members=2, new_tokens=8):
    """Five turns of the 0.5B shape, full history, against torch and against prefilling."""
    config = shape(name, "float32")
    sizes = dict(turns=turns, members=members, new_tokens=new_tokens, shape=config)
    with tiny_setting(context="full", **sizes) as (setting, directory):
        fields = {"other_name": "torch", "other": None}
        try:
            generate = torch_generator(directory)
            need("torch").set_num_threads(os.cpu_count())
            _same_weights(setting, lambda prompt: torch_logits(directory, prompt))
            fields["other"] = _make_player(setting, generate)
        except PeerMissing as error:
            fields = {"other": None, "skipped": str(error)}
        rereading = {
            "other_name": "prefill every turn",
            "other": lambda: setting.play(read_again=True),
            "target": 2,
        }
        return [
            _row("full history", setting, repeats, **fields),
            _row("the same", setting, repeats, **rereading),
        ]


def rollout_tunix(repeats, *, turns=ONE, members=16):
    """One turn against Tunix's sampler, which cannot continue a cache."""
    with tiny_setting(context="single_turn", turns=turns, members=members) as (setting, directory):
        width = length_bucket(max(len(e.turns[0].prompt) for e in setting.play()))
        new = setting.budgets.max_new_tokens
        try:
            generate = tunix_generator(
                directory, setting.model.config, prompt_width=width, new_tokens=new
            )
        except PeerMissing as error:
            return [_row("one turn", setting, repeats, skipped=str(error))]
        config = setting.model.config
        _same_weights(setting, lambda prompt: tunix_logits(directory, config, prompt))
        other = _make_player(setting, generate)
        return [_row("one turn", setting, repeats, other, other_name="tunix", target=4)]


def _against_torch(name, repeats, context, turns, members, target=None):
    with tiny_setting(context=context, turns=turns, members=members) as (setting, directory):
        try:
            generate = torch_generator(directory)
        except PeerMissing as error:
            return _row(name, setting, repeats, skipped=str(error))
        _same_weights(setting, lambda prompt: torch_logits(directory, prompt))
        other_name = choose_threads(lambda: setting.play_with(generate))
        other = _make_player(setting, generate)
        return _row(name, setting, repeats, other, other_name=other_name, target=target)


def _make_player(setting, generate):
    """Return a function that plays a setting with a peer's `generate`.

    Raises:
      RuntimeError: the lengths of the peer's prompts differ from this program's.
    """
    prompts_by_turn, _ = setting.play_with(generate)
    ours = sorted(len(turn.prompt) for episode in setting.play() for turn in episode.turns)
    theirs = sorted(len(prompt) for prompts in prompts_by_turn for prompt in prompts)
    if ours != theirs:
        raise RuntimeError("the two sides played different episodes")
    return lambda: setting.play_with(generate)


def _row(name, setting, repeats, other=None, **fields):
    episodes = setting.play()
    replies = sum(len(episode.turns) for episode in episodes)
    return Row(
        name=f"{name}: {len(episodes)} episodes, {replies} replies",
        work=replies * setting.budgets.max_new_tokens,
        unit="new tokens",
        **compare(setting.play, other, repeats=repeats),
        **fields,
    )


def _same_weights(setting, theirs):
    """Raise AssertionError if a peer's logits after a prompt differ from this program's."""
    prompt = setting.play()[0].turns[-1].prompt
    hidden, _ = setting.model.apply({"params": setting.params}, jax.numpy.asarray(prompt[None]))
    np.testing.assert_allclose(
        logits(setting.params, hidden[0, -1]), theirs(prompt), atol=1e-4, rtol=0
    )
