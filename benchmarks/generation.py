"""Generation of the tiny agent against PyTorch (transformers) and Tunix, on equal work.

Whole rollouts, environment and tokenizing included on both sides. Ours also returns the
log-probabilities of what it sampled, which the others are not asked for.
"""

import jax
import numpy as np

from benchmarks.episodes import tiny_setting
from benchmarks.measure import Row, compare
from benchmarks.peers import (
    PeerMissing,
    choose_threads,
    torch_generator,
    torch_logits,
    tunix_generator,
    tunix_logits,
)
from ragen_jax.model.qwen import logits
from ragen_jax.rollout import length_bucket

# Turns that each of eight groups plays. SHRINKING leaves 128, 112, 96, 80 and 64 episodes.
FIVE = (5,) * 8
SHRINKING = (1, 2, 3, 4, 5, 5, 5, 5)
ONE = (1,) * 8


def rollout_full(repeats, *, turns=FIVE, members=16):
    """Five turns with full history, the cache kept, against torch that prefills every turn."""
    return [_against_torch("full history", repeats, "full", turns, members, target=3)]


def rollout_single(repeats, *, turns=SHRINKING, members=16):
    """Single-turn context while episodes end, and one turn of all, against torch."""
    return [
        _against_torch("single turns, batch shrinks", repeats, "single_turn", turns, members, 1.2),
        _against_torch("one turn of all", repeats, "single_turn", ONE[: len(turns)], members),
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
            return [_row("one turn", setting, repeats, None, skipped=str(error))]
        config = setting.model.config
        _same_weights(setting, lambda prompt: tunix_logits(directory, config, prompt))
        return [_row("one turn", setting, repeats, generate, other_name="tunix", target=4)]


def _against_torch(name, repeats, context, turns, members, target=None):
    with tiny_setting(context=context, turns=turns, members=members) as (setting, directory):
        try:
            generate = torch_generator(directory)
        except PeerMissing as error:
            return _row(name, setting, repeats, None, skipped=str(error))
        _same_weights(setting, lambda prompt: torch_logits(directory, prompt))
        other_name = choose_threads(lambda: setting.play_with(generate))
        return _row(name, setting, repeats, generate, other_name=other_name, target=target)


def _row(name, setting, repeats, generate, **fields):
    """The row of a setting; a peer must have been shown prompts of the same lengths."""
    episodes = setting.play()
    other = None
    if generate is not None:
        shown = setting.play_with(generate)
        ours = sorted(len(turn.prompt) for episode in episodes for turn in episode.turns)
        theirs = sorted(len(prompt) for prompts in shown for prompt in prompts)
        if ours != theirs:
            raise RuntimeError("the two sides played different episodes")
        other = lambda: setting.play_with(generate)  # noqa: E731
    replies = sum(len(episode.turns) for episode in episodes)
    return Row(
        name=f"{name}: {len(episodes)} episodes, {replies} replies",
        work=replies * setting.budgets.max_new_tokens,
        unit="new tokens",
        **compare(setting.play, other, repeats=repeats),
        **fields,
    )


def _same_weights(setting, theirs):
    """Raises AssertionError if a peer's logits behind a prompt are not ours."""
    prompt = setting.play()[0].turns[-1].prompt
    hidden, _ = setting.model.apply({"params": setting.params}, jax.numpy.asarray(prompt[None]))
    np.testing.assert_allclose(
        logits(setting.params, hidden[0, -1]), theirs(prompt), atol=1e-4, rtol=0
    )
