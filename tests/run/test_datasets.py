"""datasets.py: demonstrations and held-out problems, and that they share no room."""

import json
import logging
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from ragen_jax.config.build_environment import build_chat, build_environment, environment_settings
from ragen_jax.configs import (
    bandit,
    countdown,
    deepcoder,
    frozen_lake,
    game_2048,
    metamathqa,
    rubik,
    search_qa,
    sokoban,
    sudoku,
    webshop,
)
from ragen_jax.envs import make_env
from ragen_jax.envs.sokoban import Sokoban, split_of
from ragen_jax.envs.types import Observation
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import ChatFormat, make_chat
from ragen_jax.rollout.env_calls import EnvFailure
from ragen_jax.run.datasets import (
    EVALUATION_SEEDS,
    IMITATION_SEEDS,
    demonstrations,
    fingerprint,
    heldout_problems,
    load_or_generate,
    play_expert,
)
from ragen_jax.storage.atomic_io import DiskRefused, retry_disk_errors
from ragen_jax.storage.checksums import damage
from ragen_jax.storage.datasets import open_or_generate, settings_hash

pytestmark = pytest.mark.fast

OPTIONS = {"size": (6, 6), "num_boxes": 1, "min_solution": 3, "max_solution": 10}
SETTINGS = {"env": "sokoban", **OPTIONS}
ROOMS, PLAN_MOVES, ACTIONS = 300, 6, 2
BUDGETS = {"actions_per_turn": ACTIONS, "max_turns": 5, "max_actions": 10}


class Counting:
    """Ten problems, chosen by a seed's last digits; two successive seeds pose the same problem."""

    def __init__(self):
        self.resets = []

    def reset(self, seed):
        self.resets.append(seed)
        return seed

    def identity(self, state):
        return f"problem {state // 2 % 10}"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The demonstrations of 300 rooms."""
    return demonstrations(
        make_env("sokoban", **OPTIONS, split="imitation"),
        rooms=ROOMS,
        plan_moves=PLAN_MOVES,
        settings=SETTINGS,
        **BUDGETS,
        directory=tmp_path_factory.mktemp("demonstrations"),
    )


def by_room(examples):
    """The turns of each room, in order."""
    rooms = []
    for example in examples:
        if example["turn"] == 0:
            rooms.append([])
        rooms[-1].append(example)
    return rooms


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.medium
def test_examples_keep_their_order_and_types(tmp_path, caplog):
    calls = []

    def generate():
        calls.append(1)
        for i in range(100):
            yield {"number": 7 * i, "text": f"√ {i}\n"}

    def load(settings):
        return load_or_generate(
            "things",
            settings,
            features={"number": np.int64, "text": np.str_},
            generate=generate,
            directory=tmp_path,
        )

    for _ in range(2):  # the second time from disk
        examples = load({"a": 1})
        assert [example["number"] for example in examples] == [7 * i for i in range(100)]
        assert [example["text"] for example in examples] == [f"√ {i}\n" for i in range(100)]
        assert len(calls) == 1
    load({"a": 2})
    assert len(calls) == 2
    # No warning of TFDS; absl's other warnings are kept.
    logging.getLogger("absl").warning("another one")
    assert [record.getMessage() for record in caplog.records] == ["another one"]
    assert sorted(folder.name for folder in tmp_path.iterdir() if folder.is_dir()) == sorted(
        f"things_{settings_hash({'a': a})}" for a in (1, 2)
    )


@pytest.mark.medium
def test_stored_examples_are_read_one_by_one_in_the_order_they_were_generated(tmp_path):
    calls = []

    def generate():
        calls.append(1)
        for i in range(1000):
            yield {"text": f"√ {i}"}

    for _ in range(2):  # the second time from disk
        stored = open_or_generate(
            "things",
            {"a": 1},
            features={"text": np.str_},
            generate=generate,
            directory=tmp_path,
        )
        assert len(stored) == 1000
        for i in (999, 0, 500, 7):
            assert stored[i] == {"index": i, "text": f"√ {i}"}
        assert [example["index"] for example in stored] == list(range(1000))
        assert len(calls) == 1


def test_what_fails_while_it_is_generated_is_generated_again(tmp_path):
    def load(generate):
        return load_or_generate(
            "things", {}, features={"x": np.int64}, generate=generate, directory=tmp_path
        )

    def broken():
        yield {"x": 1}
        raise ValueError("row 1 is no number")

    for _ in range(2):
        with pytest.raises(ValueError, match="^row 1 is no number$"):
            load(broken)
    assert [example["x"] for example in load(lambda: [{"x": 3}])] == [3]


@pytest.mark.medium
def test_a_disk_without_a_free_byte_is_refused_and_waited_for(tmp_path, monkeypatch):
    def load():
        return load_or_generate(
            "things", {}, features={"x": np.int64}, generate=lambda: [{"x": 3}], directory=tmp_path
        )

    usage, full, lines = shutil.disk_usage(tmp_path), [True], []

    def say(line):
        lines.append(line)
        full.clear()

    # tensorflow_datasets asks for the free bytes before it writes.
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=0) if full else usage
    )
    with pytest.raises(DiskRefused, match=r"things_\w+ cannot be written \(No space left"):
        load()
    with retry_disk_errors(60.0, say):
        assert load() == [{"index": 0, "x": 3}]
    assert "No space left on device): retrying for 60 s" in lines[0] and len(lines) == 2


@pytest.mark.medium
def test_a_damaged_dataset_is_told_of_and_generated_again(tmp_path, capsys):
    calls = []

    def load():
        def generate():
            calls.append(1)
            yield from ({"text": f"problem {i}"} for i in range(50))

        examples = load_or_generate(
            "things", {}, features={"text": np.str_}, generate=generate, directory=tmp_path
        )
        assert [example["text"] for example in examples] == [f"problem {i}" for i in range(50)]

    load()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    rng = np.random.default_rng(0)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) == 4  # including the checksums
    sizes = [path.stat().st_size for path in files]
    for _ in range(200):
        path = files[rng.choice(len(files), p=np.array(sizes) / sum(sizes))]
        content = path.read_bytes()
        changed = bytearray(content)
        changed[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        found = damage(folder)
        # A changed bit of the checksum file may fall in white space, which changes nothing.
        assert found or json.loads(changed) == json.loads(content), path
        path.write_bytes(content)
    assert len(calls) == 1
    for number, path in enumerate(files, start=2):
        path.write_bytes(path.read_bytes()[:-3])
        load()
        assert len(calls) == number
        assert f"warning: {path} " in capsys.readouterr().out
    load()
    assert len(calls) == 5 and damage(folder) is None


def test_settings_hash_depends_on_content_alone():
    assert settings_hash({"a": 1, "b": [6, 6]}) == settings_hash({"b": (6, 6), "a": 1})
    assert settings_hash({"a": 1}) != settings_hash({"a": 2})
    assert re.fullmatch("[0-9a-f]{12}", settings_hash({}))


# ---- held-out problems --------------------------------------------------------------------------


def heldout(environment, directory, *, count, seed=0):
    return heldout_problems(
        environment, count=count, seed=seed, settings=SETTINGS, directory=directory
    )


def test_heldout_problems_are_distinct_and_the_same_from_disk(tmp_path):
    first, second = Counting(), Counting()
    expected = [EVALUATION_SEEDS + 2 * i for i in range(4)]  # every other seed repeats a problem
    assert heldout(first, tmp_path, count=4) == (expected, expected)
    assert first.resets == [*range(EVALUATION_SEEDS, EVALUATION_SEEDS + 7), *expected]
    assert heldout(second, tmp_path, count=4) == (expected, expected)
    assert second.resets == expected  # no problem was generated again


def test_another_evaluation_seed_gives_other_problems(tmp_path):
    start = EVALUATION_SEEDS + (1 << 32)
    assert heldout(Counting(), tmp_path, count=2, seed=1)[0][0] == start
    assert heldout(Counting(), tmp_path, count=2, seed=0)[0][0] == EVALUATION_SEEDS


def test_a_stored_problem_that_changed_is_an_error(tmp_path, monkeypatch):
    environment = Counting()
    seeds, _ = heldout(environment, tmp_path, count=3)
    monkeypatch.setattr(environment, "identity", lambda state: f"problem {(state + 2) // 2 % 10}")
    with pytest.raises(ValueError, match=f"held-out problem {seeds[0]} in .*{tmp_path.name}"):
        heldout(environment, tmp_path, count=3)


class Raising(Counting):
    """Raise for some of the problems."""

    def __init__(self, raises):
        super().__init__()
        self.raises = raises

    def reset(self, seed):
        if self.raises(seed - EVALUATION_SEEDS):
            raise KeyError(f"row {seed - EVALUATION_SEEDS}")
        return super().reset(seed)


def test_a_heldout_problem_for_which_the_environment_raises_is_left_out(tmp_path, capsys):
    seeds, states = heldout(Raising(lambda n: n in (0, 1, 4)), tmp_path, count=3)
    assert seeds == states == [EVALUATION_SEEDS + n for n in (2, 5, 6)]
    line = "warning: 3 held-out problems cannot be built and are left out; first error: KeyError"
    assert line in capsys.readouterr().out
    # Stored problems keep their places, so an episode of the second problem fails.
    seeds, states = heldout(Raising(lambda n: n == 5), tmp_path, count=3)
    assert [type(state) for state in states] == [int, EnvFailure, int]
    output = capsys.readouterr().out
    assert (
        "warning: 1 of 3 held-out problems cannot be built and are not evaluated; first" in output
    )
    with pytest.raises(ValueError, match="raises for all of its 3 held-out .*: KeyError: 'row 2'"):
        heldout(Raising(lambda n: True), tmp_path, count=3)


def test_an_environment_that_raises_for_every_heldout_problem_is_refused(tmp_path):
    with pytest.raises(ValueError, match="raises for all of the first 32 .*: KeyError: 'row 0'"):
        heldout(Raising(lambda n: True), tmp_path, count=4)


def test_a_held_out_set_goes_as_far_as_the_problems_do(tmp_path, capsys):
    seeds, states = heldout(Raising(lambda n: n > 1), tmp_path, count=4)
    assert len(seeds) == len(states) < 4
    again = heldout(Raising(lambda n: n > 1), tmp_path, count=4)  # from the stored set
    assert again == (seeds, states)
    lines = capsys.readouterr().out.splitlines()
    line = f"eval.episodes=4 is an upper bound: this environment has {len(seeds)} distinct"
    assert sum(x.startswith(line) for x in lines) == 2


# ---- demonstrations -----------------------------------------------------------------------------


@pytest.mark.medium
def test_demonstrations_solve_their_rooms(shown):
    environment = make_env("sokoban", **OPTIONS, split="imitation")
    rooms = by_room(shown)
    assert len(rooms) == ROOMS
    for turns in rooms:
        state = environment.parse(turns[0]["observation"])
        assert len({turn["identity"] for turn in turns}) == 1
        assert turns[0]["identity"] == environment.identity(state)
        step, moves = None, []
        for index, turn in enumerate(turns):
            assert turn["turn"] == index
            assert turn["observation"] == environment.render(state)
            thought, answer = re.fullmatch(
                r"([^<>]+)</think><answer>([^<>]+)</answer>", turn["reply"]
            ).groups()
            actions = answer.split("||")
            assert 1 <= len(actions) <= ACTIONS
            plan = thought.split(" plan ")[1].split(" ")
            assert len(plan) <= PLAN_MOVES and plan[: len(actions)] == actions
            for action in actions:
                assert step is None or not step.done
                step = environment.step(state, action)
                state, moves = step.state, [*moves, action]
        assert step.done and step.info["success"]
        assert 3 <= len(moves) <= 10
        assert all(len(turn["reply"].split("||")) == ACTIONS for turn in turns[:-1])


@pytest.mark.medium
def test_rooms_come_in_the_order_of_their_seeds(shown):
    environment = make_env("sokoban", **OPTIONS, split="imitation")
    first = [turns[0]["observation"] for turns in by_room(shown)]
    for i in (0, 1, 2, 150, 299):
        assert first[i] == environment.render(environment.reset(IMITATION_SEEDS + i))


def test_a_demonstrated_reply_is_read_as_valid(shown, tokenizer):
    environment = make_env("sokoban", **OPTIONS, split="imitation")
    chat = make_chat(
        *(tokenizer, environment),
        ChatFormat(context="single_turn", prompt="terse", actions_per_turn=ACTIONS, max_actions=10),
    )
    for example in shown[:200]:
        thought, answer = example["reply"].removesuffix("</answer>").split("</think><answer>")
        ids = tokenizer.encode(example["reply"], add_special_tokens=False)
        reply = chat.read(ids)
        assert reply.valid and reply.actions == tuple(answer.split("||"))
        assert chat.text(ids[slice(*reply.reasoning)]) == thought
        assert chat.text(ids[slice(*reply.answer)]) == answer


def slippery(directory, **budgets):
    """Demonstrations of 60 lakes where every other move slips, and their environment."""
    options = {"size": (4, 4), "slip": 0.5, "max_solution": 10}
    environment = make_env("frozen_lake", **options, split="imitation")
    shown = demonstrations(
        environment,
        rooms=60,
        plan_moves=3,
        settings={"env": "frozen_lake", **options},
        directory=directory,
        **(BUDGETS | budgets),
    )
    return by_room(shown), environment


@pytest.mark.medium
def test_the_expert_plans_anew_from_where_a_slip_has_led(tmp_path):
    lakes, environment = slippery(tmp_path / "a")
    slipped = holes = 0
    for turns in lakes:
        # Every possible position of the player before each turn, and the move intended there.
        places = {environment.parse(turns[0]["observation"])}
        for index, turn in enumerate(turns):
            assert turn["turn"] == index
            state = environment.parse(turn["observation"])
            assert state in places
            plan = environment.solve(state)
            thought = environment.explain(state, plan[:3])
            answer = "||".join(plan[:ACTIONS])
            assert turn["reply"] == f"{thought}</think><answer>{answer}</answer>"
            intended, places = state, {state}
            for action in plan[:ACTIONS]:
                intended = environment.step(intended, action, None).state
                places = {
                    type(place)(place.lake, cell)
                    for place in places
                    for _, cell, _, _ in environment.outcomes(place, action)
                }
            if index + 1 < len(turns):
                slipped += environment.parse(turns[index + 1]["observation"]) != intended
        assert len(turns) <= 5
        holes += len(turns) < 5 and not intended.is_on_goal
    assert slipped > 20 and holes > 0  # an episode that ends in a hole is shown up to it
    assert slippery(tmp_path / "b")[0] == lakes  # slips are drawn by the seed


class Unsolved:
    """Sokoban whose solver gives up on boxes that need more than `most` moves."""

    def __init__(self, most):
        self._environment, self._most = make_env("sokoban", **OPTIONS, split="imitation"), most

    def __getattr__(self, name):
        return getattr(self._environment, name)

    def solve(self, state):
        plan = self._environment.solve(state)
        return plan if plan is not None and len(plan) <= self._most else None


@pytest.mark.medium
def test_problems_without_a_solution_are_left_out(shown, tmp_path, capsys):
    rooms = by_room(shown)

    def play(most):
        return demonstrations(
            Unsolved(most),
            rooms=ROOMS,
            plan_moves=PLAN_MOVES,
            settings=SETTINGS,
            **BUDGETS,
            directory=tmp_path,
        )

    def contents(examples):
        return [(e["identity"], e["turn"], e["observation"], e["reply"]) for e in examples]

    moves = {room[0]["identity"]: sum(e["reply"].count("||") + 1 for e in room) for room in rooms}
    kept = [room for room in rooms if moves[room[0]["identity"]] <= 6]
    assert 20 < len(kept) < ROOMS - 20
    assert contents(play(6)) == contents(example for room in kept for example in room)
    message = (
        f"{ROOMS - len(kept)} of {ROOMS} demonstration problems have no solution and are left out"
    )
    assert message in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"no solution for any of {ROOMS} demonstration problems"):
        play(0)


@pytest.mark.medium
def test_the_expert_keeps_to_the_budgets(tmp_path):
    lakes, _ = slippery(tmp_path, max_turns=4, max_actions=5)
    answers = [[turn["reply"].count("||") + 1 for turn in turns] for turns in lakes]
    assert max(map(len, answers)) == 3  # 2 + 2 + 1 actions
    assert all(counts[2] == 1 for counts in answers if len(counts) == 3)
    lakes, _ = slippery(tmp_path, max_turns=2)
    assert max(map(len, lakes)) == 2


@pytest.mark.medium
@pytest.mark.parametrize(
    "module",
    [
        *(bandit, countdown, deepcoder, frozen_lake, metamathqa, rubik),
        *(search_qa, sokoban, sudoku, webshop),
    ],
)
def test_demonstrated_replies_are_what_the_rollout_reads(module, tmp_path):
    config = module.get_config()
    environment = build_environment(config.env, "imitation")
    tokenizer = build_tokenizer(environment.words)
    chat = build_chat(config, tokenizer, environment)
    shown = demonstrations(
        environment,
        rooms=60,
        plan_moves=config.warmstart.plan_moves,
        actions_per_turn=config.env.actions_per_turn,
        max_turns=config.env.max_turns,
        max_actions=config.env.max_actions,
        settings=environment_settings(config.env),
        directory=tmp_path,
    )
    solved = 0
    for seed, turns in enumerate(by_room(shown), IMITATION_SEEDS):
        state = environment.reset(seed)
        for turn in turns:
            if environment.render(state) != turn["observation"]:
                break  # a slip led here
            ids = tokenizer.encode(turn["reply"], add_special_tokens=False)
            assert len(ids) < config.rollout.max_new_tokens  # leaves room for the stop token
            reply = chat.read([*ids, chat.close_id])
            assert reply.valid
            for action in reply.actions:
                step = environment.step(state, action, None)
                state = step.state
        solved += step.info["success"]
    assert solved >= 50


@pytest.mark.medium
def test_a_scripted_players_replies_are_what_the_rollout_reads():
    config = game_2048.get_config()
    environment = build_environment(config.env, "imitation")
    tokenizer = build_tokenizer(environment.words)
    chat = build_chat(config, tokenizer, environment)
    budgets = {name: config.env[name] for name in ("actions_per_turn", "max_turns", "max_actions")}
    plan_moves = config.warmstart.plan_moves
    for shown in play_expert(environment, range(50), plan_moves=plan_moves, **budgets):
        ids = tokenizer.encode(shown["reply"], add_special_tokens=False)
        assert len(ids) < config.rollout.max_new_tokens  # leaves room for the stop token
        reply = chat.read([*ids, chat.close_id])
        assert reply.valid and 1 <= len(reply.actions) <= 2
        state = environment.parse(shown["observation"])
        assert environment.step(state, reply.actions[0], None).info["moved"]
    # Every number is a single token.
    assert tokenizer.tokenize("tile 64 00 merge 4 02 03 plan Left") == [
        *("tile", " 64", " 00", " merge", " 4", " 02", " 03", " plan", " Left"),
    ]
    assert tokenizer.tokenize("16 _ 2\n_ 64") == ["16", " _", " 2", "\u010a", "_", " 64"]


# ---- splits -------------------------------------------------------------------------------------


@pytest.mark.medium
def test_no_room_is_shared_by_imitation_training_and_evaluation(shown, tmp_path):
    training = make_env("sokoban", **OPTIONS, split="train")
    evaluation = make_env("sokoban", **OPTIONS, split="eval")
    imitated = {example["identity"] for example in shown}
    trained = {training.identity(training.reset(seed)) for seed in range(300)}
    seeds, states = heldout(evaluation, tmp_path, count=300)
    judged = [evaluation.identity(state) for state in states]
    assert len(set(judged)) == 300
    assert states[:5] == [evaluation.reset(seed) for seed in seeds[:5]]
    # the sets are not small because of repeated problems
    assert min(len(imitated), len(trained)) > 250
    assert {split_of(example["observation"]) for example in shown} == {"imitation"}
    assert not imitated & trained
    assert not imitated & set(judged)
    assert not trained & set(judged)


@pytest.mark.medium
def test_an_expert_of_two_minds_does_the_same_in_both():
    environment = Sokoban(size=(6, 6), split="imitation")
    styles = environment.styles
    budgets = dict(plan_moves=4, actions_per_turn=2, max_turns=5, max_actions=10)

    def show(rooms, **thoughts):
        seeds = range(IMITATION_SEEDS, IMITATION_SEEDS + rooms)
        found = {name: [] for name in styles}
        for example in play_expert(environment, seeds, styles=thoughts, **budgets):
            thought, did = example["reply"].split("</think>")
            (name, *_) = [
                n for n, style in styles.items() if n in thoughts and style.matches(thought)
            ]
            found[name].append((example["observation"], example["turn"], did))
        return found

    plain = list(play_expert(environment, [IMITATION_SEEDS], styles={}, **budgets))
    assert all(styles["grounded"].matches(e["reply"].split("</think>")[0]) for e in plain)
    halves = show(60, grounded=0.5, template=0.5)
    assert halves["grounded"] == halves["template"] and len(halves["grounded"]) > 100
    assert halves["grounded"][: len(plain)] == [
        (e["observation"], e["turn"], e["reply"].split("</think>")[1]) for e in plain
    ]
    mixed = show(600, grounded=0.2, template=0.8, silent=0.0)
    starts = {name: sum(turn == 0 for _, turn, _ in shown) for name, shown in mixed.items()}
    assert starts["template"] == 600 and starts["silent"] == 0
    # A quarter of 600, within four standard deviations.
    assert abs(starts["grounded"] - 150) < 4 * (600 * 0.25 * 0.75) ** 0.5
    assert set(mixed["grounded"]) <= set(mixed["template"])


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake", "bandit", "metamathqa"])
def test_an_expert_in_sentences_does_the_same(name):
    environment = make_env(name, split="imitation")
    play = dict(plan_moves=3, **BUDGETS)
    seeds = range(IMITATION_SEEDS, IMITATION_SEEDS + 10)
    words = list(play_expert(environment, seeds, **play))
    examples = list(play_expert(environment, seeds, **play, sentences=True))
    assert words == list(play_expert(environment, seeds, **play, sentences=False))
    for word, sentence in zip(words, examples, strict=True):
        (explained, answer), (text, other) = (
            example.pop("reply").split("</think>") for example in (word, sentence)
        )
        assert answer == other and word == sentence and text != explained
        assert environment.sentence_styles["grounded"].matches(text)


def test_an_expert_in_sentences_shows_several_solutions():
    environment = make_env("countdown", split="imitation")
    play = dict(plan_moves=1, actions_per_turn=1, max_turns=1, max_actions=1)
    seeds = range(IMITATION_SEEDS, IMITATION_SEEDS + 30)
    examples = list(play_expert(environment, seeds, **play, sentences=True))
    assert examples == list(play_expert(environment, seeds, **play, sentences=True))
    plain = [
        example["reply"].split("<answer>")[1] for example in play_expert(environment, seeds, **play)
    ]
    assert plain == [f"{environment.solve(environment.reset(seed))[0]}</answer>" for seed in seeds]
    usual = 0
    for seed, example in zip(seeds, examples, strict=True):
        state = environment.reset(seed)
        text, answer = example["reply"].removesuffix("</answer>").split("</think><answer>")
        assert environment.step(state, answer).info["success"]
        assert text == environment.narrate(state, (answer,))
        usual += (answer,) == environment.solve(state)
    assert usual < 15


def test_sentences_mix_their_own_styles():
    environment = make_env("countdown", split="imitation")  # it has no `styles`
    play = dict(plan_moves=1, actions_per_turn=1, max_turns=1, max_actions=1, sentences=True)
    seeds = range(IMITATION_SEEDS, IMITATION_SEEDS + 60)
    shown = list(play_expert(environment, seeds, styles=dict(grounded=0.5, template=1.0), **play))
    styles = environment.sentence_styles
    texts = [example["reply"].split("</think>")[0] for example in shown]
    counts = [sum(map(styles[name].matches, texts)) for name in ("grounded", "template")]
    assert counts[1] == 60 and sum(counts) == len(texts) and 15 < counts[0] < 45


class Terse:
    """Bandit whose expert has no sentences, or only one kind of them."""

    def __init__(self, *members):
        self._environment, self._members = make_env("bandit", split="imitation"), members

    def __getattr__(self, name):
        if name in ("narrate", "sentence_styles") and name not in self._members:
            raise AttributeError(name)
        return getattr(self._environment, name)


def test_an_expert_without_sentences_is_refused(tmp_path):
    play = dict(plan_moves=1, **BUDGETS, sentences=True)
    line = "environment Terse has no narrate .*types.py.*, which demonstrations for a language mod"
    for call in (
        lambda: list(play_expert(Terse(), [IMITATION_SEEDS], **play)),
        lambda: fingerprint(Terse(), **play),
        lambda: demonstrations(Terse(), rooms=3, settings={}, directory=tmp_path, **play),
    ):
        with pytest.raises(ValueError, match=line):
            call()
    assert fingerprint(Terse("narrate"), **play)
    with pytest.raises(ValueError, match="environment Terse has no sentence_styles "):
        fingerprint(Terse("narrate"), **play, styles=dict(silent=1.0))


def test_only_sentences_change_the_name_of_a_data_set(tmp_path):
    environment = make_env("bandit", split="imitation")
    play = dict(plan_moves=1, **BUDGETS)

    def folders(**changes):
        demonstrations(environment, rooms=20, settings={}, directory=tmp_path, **play | changes)
        return {path.name for path in tmp_path.iterdir() if path.is_dir()}

    first = folders()
    assert len(first) == 1 and folders(sentences=False) == first
    assert len(folders(sentences=True)) == 2
    usual, changed = (fingerprint(environment, **play, sentences=x) for x in (False, True))
    assert usual == fingerprint(environment, **play) != changed


RACE = """
import sys, time
from pathlib import Path
import numpy as np
from ragen_jax.run.datasets import load_or_generate

def generate():
    time.sleep(2)  # in which the others begin
    yield {"x": 7}

settings = dict(features={"x": np.int64}, generate=generate, directory=Path(sys.argv[1]))
print([int(example["x"]) for example in load_or_generate("race", {}, **settings)])
"""


@pytest.mark.medium
def test_several_processes_begin_with_the_same_data_set(tmp_path):
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.splitlines()[-1] == "[7]", err


@pytest.mark.medium
@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_pictures_are_drawn_again_and_not_kept(name, tmp_path):
    seen = make_env(name, observation="image", split="imitation")
    read = make_env(name, split="imitation")
    play = dict(plan_moves=4, **BUDGETS)
    shown, plain = (
        demonstrations(e, rooms=20, settings={}, directory=tmp_path / kind, **play)
        for kind, e in (("seen", seen), ("read", read))
    )
    assert [x["reply"] for x in shown] == [x["reply"] for x in plain]
    assert all(isinstance(x["observation"], Observation) for x in shown)
    assert not (tmp_path / "seen").exists() and (tmp_path / "read").exists()
    # The cache's name depends on the tile size of the pictures.
    small = make_env(name, observation="image", tile=8, split="imitation")
    assert len({fingerprint(e, **play) for e in (seen, small, read)}) == 3
