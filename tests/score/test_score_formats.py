"""The same 64 episodes in every format, as its tool writes them, have the same figures."""

import json

import numpy as np
import pytest
import trainer_files
import trainer_formats
from cli_commands import call
from tiny_episodes import FORM, episodes_of

from ragen_jax.config.build_environment import build_environment
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.rollout.chat import make_chat
from ragen_jax.run.log import write_rollouts
from ragen_jax.score import notices
from ragen_jax.score.encode import Encoder
from ragen_jax.score.episodes import encode_rows, make_steps
from ragen_jax.score.files import read_files

pytestmark = pytest.mark.fast
GROUPS = MEMBERS = 8
END = 258  # the id of <|im_end|>
CASES = [(name, 1) for name in trainer_files.WRITERS]
CASES += [(name, 2) for name in trainer_files.WRITERS if name not in trainer_formats.SINGLE]


@pytest.fixture(scope="module")
def ours(tokenizer, tmp_path_factory):
    """{turns: (path of our file, its records)}."""
    environment = build_environment(sokoban.get_config().env, "train")
    chat, found = make_chat(tokenizer, environment, FORM), {}
    for turns in (1, 2):
        path = tmp_path_factory.mktemp(f"ours{turns}") / "step_000001.jsonl"
        episodes = episodes_of(chat, environment, turns, GROUPS, MEMBERS)
        write_rollouts(path, episodes, chat, lambda turn: turn.reward, set())
        found[turns] = path, trainer_formats.read(path)
    return found


def steps_of(tokenizer, path):
    """(the steps of a file or folder, `FileContents`, `Encoder`)."""
    encoder = Encoder(tokenizer, len(tokenizer))
    read = read_files([str(path)])
    replies, broken = encode_rows(read.rows, encoder)
    assert not broken and not read.broken, (broken, read.broken)
    return make_steps(read.rows, replies)[0], read, encoder


def shown(turn):
    """The ids of a turn, and where its reasoning is.

    Text does not hold the token that ends a reply. Of a reply without reasoning, which no figure
    scores, it does not tell whether the policy or the template wrote a tag at its beginning.
    """
    prompt, ids = turn.prompt.tolist(), turn.sampled.tolist()
    ids = ids[: len(ids) - (ids[-1] == END)]
    return (prompt, ids, turn.reasoning) if turn.reasoning[1] else prompt + ids


@pytest.mark.parametrize("name,turns", CASES)
def test_a_format_gives_the_episodes_of_our_own(tokenizer, ours, tmp_path, name, turns):
    writer, form, has_ids, lacks = trainer_files.WRITERS[name]
    path, records = ours[turns]
    (expected,), _, _ = steps_of(tokenizer, path)
    named = writer(tmp_path, records, tokenizer)
    (step,), read, encoder = steps_of(tokenizer, named)
    assert step.number == 1 and len(step.episodes) == len(records) == 64
    for episode, own in zip(step.episodes, expected.episodes, strict=True):
        assert (episode.group, episode.member) == (own.group, own.member)
        assert list(map(shown, episode.turns)) == list(map(shown, own.turns))
    if "reward" in lacks:
        assert np.isnan(step.reward_E).all()
    else:
        assert step.reward_E.tolist() == expected.reward_E.tolist()
    assert step.success == ("success" not in lacks)
    assert notices.read_line(read, [str(named)]) == f"read 64 rows of {form} from {named}"
    lines = list(notices.unrecorded_lines(read))
    assert [line.split(" record no ")[1].partition(":")[0] for line in lines] == [lacks] * bool(
        lacks
    )
    if has_ids:
        assert notices.prompts_line(encoder) == f"prompts: {64 * turns} with recorded token ids"


def test_prompts_are_counted_by_how_exactly_they_are_known(tokenizer, tmp_path):
    """The later prompts of an output with several turns are as exact as its first."""
    turn = "<think>a</think>b"
    rows = [
        {"input": "user\n2+2?\nassistant\n", "output": turn, "score": 1},
        {"input": "user\n2+2?\nassistant\n", "output": f"{turn}\nuser\nno\nassistant\n{turn}"},
        {"input": "Q: 2+2? A:", "output": turn, "score": 1},
        {"input": [1, 2], "output": [3, 4], "score": 1},
        {"input": [{"role": "user", "content": "2+2?"}], "output": turn, "score": 1},
    ]
    _, read, encoder = steps_of(tokenizer, trainer_formats.write(tmp_path / "1.jsonl", rows))
    assert len(read.rows) == 5 and notices.prompts_line(encoder) == (
        "prompts: 1 with recorded token ids, 1 rendered from messages by the chat template, "
        "3 restored exactly from text, 1 scored as plain text"
    )


@pytest.fixture(scope="module")
def model(agent, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, agent.model, agent.params, agent.tokenizer)
    return path


def score(model, path, out):
    words = "--first_turn_samples=64", "--trajectory_samples=16", "--seed=3"
    code, printed, errors = call(
        "ragen_jax.score", f"--model={model}", f"--rollouts={path}", f"--out={out}", *words
    )
    assert code == 0, errors
    return json.loads(out.read_text())["steps"][0], printed.splitlines()


@pytest.fixture(scope="module")
def expected(model, ours, tmp_path_factory):
    """{turns: the figures of our own file}."""
    out = tmp_path_factory.mktemp("out") / "score.json"
    return {turns: score(model, ours[turns][0], out)[0] for turns in (1, 2)}


@pytest.mark.long
@pytest.mark.parametrize("name,turns", CASES)
def test_a_format_has_the_figures_of_our_own(model, agent, ours, expected, tmp_path, name, turns):
    """Equal to 1e-6 where ids are kept, to 1e-4 where text is restored."""
    writer, form, has_ids, lacks = trainer_files.WRITERS[name]
    named = writer(tmp_path, ours[turns][1], agent.tokenizer)
    step, printed = score(model, named, tmp_path / "score.json")
    assert printed[0] == f"read 64 rows of {form} from {named}"
    assert printed[1].startswith(f"prompts: {64 * turns} ")
    line = f"64 rows of {form} record no {lacks}"
    assert not lacks or printed[2].startswith(line), printed[:3]
    assert step["episodes"] == 64 and step["groups"] == GROUPS
    own = expected[turns]
    assert own["collapse/first_turn/mi"] != 0 and "flow/first_turn/za_swap" in own
    # Only our own files hold parsed actions and validity; see also the line about missing values.
    own = {k: v for k, v in own.items() if not k.startswith(("action/", "rollout/valid_rate"))}
    missing = own.keys() - step.keys()
    of_values = "anatomy/", "rollout/success", "rollout/return", "symptoms/length_"
    assert all(key.startswith(of_values) for key in missing), missing
    assert lacks or not missing, missing
    if not has_ids:  # replies lack the token that ends them
        assert step.pop("rollout/response_length") == pytest.approx(
            own["rollout/response_length"], abs=1
        )
        del step["rollout/response_length_ci95"]
    for key in own.keys() & step.keys():
        exact = 1e-6 if has_ids else 1e-4
        if not has_ids and key.startswith("symptoms/"):  # fractions of a reply and its end
            exact = 1.0 if "length" in key else 0.02
        assert step[key] == pytest.approx(own[key], abs=exact), key
