"""Sokoban: rules and rewards by hand, the generator, the solver, the splits."""

import dataclasses
import hashlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.problems import SPLITS, Draws
from ragen_jax.envs.problems import canonical_grid as canonical
from ragen_jax.envs.sokoban import Sokoban, rooms, split_of
from ragen_jax.envs.sokoban.board import MOVES, State, cells
from ragen_jax.envs.sokoban.solver import live_cells
from ragen_jax.envs.types import Environment, SolvableEnvironment, Step

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)

LEVEL = """\
######
#P___#
#_X__#
#__O_#
#____#
######"""

ALL_BUT_P = """\
#####
#_√O#
#XX_#
#_S_#
#####"""

# sha256 of the grid texts of seeds 0..49 with default options. A different digest means that every
# room has changed, and with it warm starts, evaluation sets and resumed runs.
ROOMS_0_TO_49 = "42c2fb63b9fce61acccacd42662dbb652314dfab8f373a207d9556c9ebee8d27"


def rooms_digest() -> str:
    env = Sokoban()
    texts = [env.grid_text(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def play(env, state, actions) -> list[Step]:
    """The steps of a sequence of actions."""
    steps = []
    for action in actions:
        steps.append(env.step(state, action, RNG))
        state = steps[-1].state
    return steps


def images(text: str) -> list[str]:
    """The eight rotations and reflections of a grid text, by NumPy."""
    grid = np.array([list(row) for row in text.split("\n")])
    turned = [np.rot90(g, k) for g in (grid, grid.T) for k in range(4)]
    return ["\n".join("".join(row) for row in g) for g in turned]


def text_step(text: str, action: str) -> str:
    """An independent implementation of `Sokoban.step` on the text."""
    grid = [list(row) for row in text.split("\n")]
    (r, c) = next((r, c) for r, row in enumerate(grid) for c, s in enumerate(row) if s in "PS")
    dr, dc = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}[action]

    def at(row, column):
        inside = 0 <= row < len(grid) and 0 <= column < len(grid[0])
        return grid[row][column] if inside else "#"

    leave, enter = {"P": "_", "S": "O"}, {"_": "P", "O": "S", "X": "P", "√": "S"}
    ahead, beyond = at(r + dr, c + dc), at(r + 2 * dr, c + 2 * dc)
    if ahead == "#" or (ahead in "X√" and beyond not in "_O"):
        return text
    if ahead in "X√":
        grid[r + 2 * dr][c + 2 * dc] = {"_": "X", "O": "√"}[beyond]
    grid[r][c] = leave[grid[r][c]]
    grid[r + dr][c + dc] = enter[ahead]
    return "\n".join("".join(row) for row in grid)


def brute_force_length(text: str, limit: int = 10**9) -> int | None:
    """The length of a shortest solution, by breadth-first search over texts without pruning."""
    queue, seen = deque([(text, 0)]), {text}
    while queue:
        text, depth = queue.popleft()
        if "X" not in text:
            return depth
        if depth < limit:
            for action in MOVES:
                after = text_step(text, action)
                if after not in seen:
                    seen.add(after)
                    queue.append((after, depth + 1))
    return None


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("sokoban", size=(7, 6), num_boxes=2, split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert env.actions == ("Up", "Down", "Left", "Right")
    assert ENVS["sokoban"] is Sokoban
    assert env.grid_text(env.reset(1)).count("\n") == 6
    with pytest.raises(ValueError, match=r"'frozen'.*known: .*sokoban"):
        make_env("frozen")
    with pytest.raises(ValueError, match=r"'boxes'.*accepted: size, num_boxes"):
        make_env("sokoban", boxes=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 6}, "size must be two whole numbers.*got 6"),
        ({"size": (6, 2)}, "size must be .*at least 3, got 2"),
        ({"size": (6, 6.0)}, "size must be a whole number.*got 6.0"),
        ({"num_boxes": 0}, "num_boxes must be .*at least 1, got 0"),
        ({"num_boxes": True}, "num_boxes must be .*got True"),
        ({"num_boxes": 8}, "16 cells inside its border, but num_boxes=8 needs at least 17"),
        ({"min_solution": 0}, "min_solution must be .*at least 1, got 0"),
        ({"min_solution": 5, "max_solution": 4}, "max_solution must be .*at least 5, got 4"),
        ({"size": (200, 200)}, "size must be .*at most 20, got 200"),
        ({"size": (20, 20), "num_boxes": 9}, "num_boxes must be .*at most 8, got 9"),
        ({"size": (9, 9), "num_boxes": 6, "max_solution": 31}, "at most 30 with more than 5 boxes"),
        ({"min_solution": 25}, "min_solution must be .*at most 24, got 25"),
        ({"max_solution": 10**9}, "max_solution must be .*at most 200, got 1000000000"),
        ({"min_solution": float("nan")}, "min_solution must be .*got nan"),
        (
            {"observation": "pixels"},
            "observation must be one of 'grid', 'coordinate', 'both', 'image'",
        ),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sokoban(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Sokoban().reset(seed)
    Sokoban().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    env = Sokoban()
    state = env.parse(LEVEL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.player = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.room.floor = 0
    assert len({state, env.parse(LEVEL), env.step(state, "Right", RNG).state}) == 2
    before = env.grid_text(state)
    env.step(state, "Down", RNG)
    assert env.grid_text(state) == before


# ---- text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [LEVEL, ALL_BUT_P, "PXO", "O\n√\nX\nP"])
def test_parse_and_grid_text_are_inverse(text):
    env = Sokoban()
    assert env.grid_text(env.parse(text)) == text


@pytest.mark.medium
@given(st.text("#_O√XPS\n", max_size=30))
@settings(max_examples=300, deadline=None)
def test_parse_is_exact_or_refuses(text):
    env = Sokoban()
    try:
        state = env.parse(text)
    except ValueError:
        return
    assert env.grid_text(state) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("####\n#P.#\n####", "unknown symbol '.' at row 1, column 2"),
        ("# # #", "unknown symbol ' ' at row 0, column 1"),
        ("#####\n#PXO\n#####", "row 1 has 4 symbols where row 0 has 5"),
        ("#####\n#PXO#\n#####\n", "row 3 has 0 symbols where row 0 has 5"),
        ("", "row 0 has 0 symbols"),
        ("#####\n#_XO#\n#####", "exactly one player .* found 0"),
        ("######\n#PXOS#\n######", r"found 2, at \(1, 1\) and \(1, 4\)"),
        ("#####\n#PX_#\n#####", r"boxes at \[\(1, 2\)\] and targets at \[\]"),
        ("#####\n#SXO#\n#####", r"boxes at \[\(1, 2\)\] and targets at \[\(1, 1\), \(1, 3\)\]"),
        ("#####\n#P__#\n#####", "at least one"),
    ],
)
def test_parse_says_what_is_wrong_and_where(text, message):
    with pytest.raises(ValueError, match=message):
        Sokoban().parse(text)


def test_observations():
    state = Sokoban().parse(ALL_BUT_P)
    words = (
        "Room: 5 rows, 5 columns\n"
        "Player: (3, 2)\n"
        "Boxes: (1, 2), (2, 1), (2, 2)\n"
        "Targets: (1, 2), (1, 3), (3, 2)\n"
        "Walls inside the border: none"
    )
    assert Sokoban(observation="grid").render(state) == ALL_BUT_P
    assert Sokoban(observation="coordinate").render(state) == words
    assert Sokoban(observation="both").render(state) == ALL_BUT_P + "\n" + words


def test_coordinate_text_lists_inner_walls_and_open_borders():
    env = Sokoban(observation="coordinate")
    assert env.render(env.parse("#####\n#P#_#\n#_XO#\n#####")).endswith(
        "\nWalls inside the border: (1, 2)"
    )
    assert env.render(env.parse("#PXO")).endswith("\nWalls: (0, 0)")


@pytest.mark.parametrize("observation", ["grid", "coordinate", "both"])
def test_instructions_explain_what_is_shown(observation):
    env = Sokoban(observation=observation)
    grid, coordinate = observation != "coordinate", observation != "grid"
    for symbol in "# wall, _ empty floor, O target, X box, √ box on a target, P you, S you".split(
        ","
    ):
        assert (symbol.strip() in env.instructions) == grid
    assert ("(row, column)" in env.instructions) == coordinate
    assert all(action in env.instructions for action in env.actions)
    assert "<" not in env.instructions


# ---- rules --------------------------------------------------------------------------------------


def test_hand_made_level_with_exact_rewards():
    env = Sokoban()
    steps = play(env, env.parse(LEVEL), ["Up", "Down", "Right", "Down"])
    # A wall above; a plain step; a push onto floor; then the way is free.
    assert [s.reward for s in steps] == [-0.1] * 4
    assert [s.info["moved"] for s in steps] == [False, True, True, True]
    assert [s.info["pushed"] for s in steps] == [False, False, True, False]
    assert not any(s.done or s.info["success"] for s in steps)
    assert env.grid_text(steps[-1].state) == ("######\n#____#\n#__X_#\n#_PO_#\n#____#\n######")
    last = play(env, steps[-1].state, ["Left", "Up", "Up", "Right", "Right", "Down"])
    assert [s.reward for s in last[:-1]] == [-0.1] * 5
    assert last[-1].reward == pytest.approx(-0.1 + 1 + 10, abs=1e-12)
    assert last[-1].done and last[-1].info == {"success": True, "moved": True, "pushed": True}
    assert env.grid_text(last[-1].state) == ("######\n#____#\n#__P_#\n#__√_#\n#____#\n######")


def test_box_off_target_from_target_to_target_and_player_on_target():
    env = Sokoban()
    off = env.step(env.parse("P√_XO"), "Right", RNG)
    assert off.reward == pytest.approx(-1.1, abs=1e-12) and not off.done
    assert env.grid_text(off.state) == "_SXXO"
    along = env.step(env.parse("P√OX"), "Right", RNG)
    assert along.reward == pytest.approx(-0.1, abs=1e-12) and along.info["pushed"]
    assert env.grid_text(along.state) == "_S√X"
    left = env.step(off.state, "Left", RNG)
    assert left.reward == -0.1 and env.grid_text(left.state) == "POXXO"


def test_one_box_of_two_on_target_is_not_the_end():
    env = Sokoban()
    step = env.step(env.parse("#######\n#OXPXO#\n#######"), "Left", RNG)
    assert step.reward == pytest.approx(0.9, abs=1e-12)
    assert not step.done and not step.info["success"]
    second = play(env, step.state, ["Right", "Right"])
    assert [s.done for s in second] == [False, True]
    assert second[-1].reward == pytest.approx(10.9, abs=1e-12)


@pytest.mark.parametrize("text", ["PXXOO", "_#\nXO\nPX\nO_", "O\nP\nX", "#####\n#PX##\n##O##"])
def test_blocked_pushes_change_nothing(text):
    env = Sokoban()
    state = env.parse(text)
    for action in env.actions:
        step = env.step(state, action, RNG)
        if text_step(text, action) == text:
            assert step.state == state and step.reward == -0.1
            assert step.info == {"success": False, "moved": False, "pushed": False}
    blocked = {"PXXOO": "Right", "O\nP\nX": "Down", "#####\n#PX##\n##O##": "Right"}
    if text in blocked:
        assert env.step(state, blocked[text], RNG).state == state


def test_a_solved_room_pays_the_final_reward_once():
    env = Sokoban()
    step = env.step(env.parse("P_√"), "Left", RNG)
    assert step.done and step.info["success"] and step.reward == -0.1
    reopened = env.step(env.parse("P√_"), "Right", RNG)
    assert not reopened.done and reopened.reward == pytest.approx(-1.1, abs=1e-12)


@pytest.mark.parametrize("action", ["up", "UP", "", "Jump", " Up", "Up || Down"])
def test_unknown_actions_are_refused(action):
    env = Sokoban()
    with pytest.raises(ValueError, match="unknown action.*accepted: Up, Down, Left, Right"):
        env.step(env.parse(LEVEL), action, RNG)


@pytest.mark.medium
@pytest.mark.parametrize("num_boxes", [1, 3])
def test_random_play_agrees_with_the_rules_on_text(num_boxes):
    env = Sokoban(size=(7, 8), num_boxes=num_boxes, split=None)
    rng = np.random.default_rng(num_boxes)
    pushes = 0
    for seed in range(20):
        state = env.reset(seed)
        for _ in range(150):
            before = env.grid_text(state)
            action = env.actions[rng.integers(4)]
            step = env.step(state, action, RNG)
            state, text = step.state, env.grid_text(step.state)
            assert text == text_step(before, action)
            assert env.parse(text) == state
            solved, on = "X" not in text, text.count("√") - before.count("√")
            newly = solved and "X" in before
            assert step.reward == pytest.approx(-0.1 + on + 10 * newly, abs=1e-12)
            assert step.done == step.info["success"] == solved
            assert step.info["moved"] == (text != before)
            pushes += step.info["pushed"]
    assert pushes > 20


# ---- generator ----------------------------------------------------------------------------------


def test_rooms_are_pinned():
    assert rooms_digest() == ROOMS_0_TO_49


@pytest.mark.medium
@pytest.mark.parametrize(
    "options, count",
    [
        ({}, 200),
        ({"min_solution": 5, "max_solution": 10, "split": "eval"}, 50),
        ({"min_solution": None, "split": "imitation"}, 100),
        ({"size": (5, 8), "num_boxes": 2, "split": None}, 50),
        ({"size": (8, 8), "num_boxes": 2}, 10),
        ({"size": (10, 10), "num_boxes": 3, "max_solution": 60}, 4),
    ],
)
def test_rooms_are_as_asked_and_solvable(options, count):
    env = Sokoban(**options)
    least, most = options.get("min_solution", 3) or 1, options.get("max_solution") or 10**9
    for seed in range(count):
        state = env.reset(seed)
        text = env.grid_text(state)
        rows = text.split("\n")
        assert (len(rows), len(rows[0])) == env.size
        assert set(rows[0] + rows[-1] + "".join(row[0] + row[-1] for row in rows)) == {"#"}
        assert text.count("X") + text.count("√") == env.num_boxes
        assert env.split in (None, split_of(text))
        assert "X" in text
        plan = env.solve(state)
        assert plan is not None and least <= len(plan) <= most
        steps = play(env, state, plan)
        assert [s.done for s in steps] == [False] * (len(plan) - 1) + [True]


def test_no_attempt_starts_solved():
    drawn = [rooms.draw_room(Draws(seed, 0, rooms.TAG), (6, 6), 1) for seed in range(300)]
    assert sum(state is None for state in drawn) < 200
    assert not any(state.is_solved for state in drawn if state is not None)


@pytest.mark.medium
def test_reset_is_pure_and_rooms_vary():
    env = Sokoban()
    texts = [env.grid_text(env.reset(seed)) for seed in range(300)]
    assert env.grid_text(Sokoban().reset(7)) == texts[7]
    assert len({canonical(text) for text in texts}) > 270
    lengths = [len(env.solve(env.parse(text))) for text in texts]
    assert set(range(3, 11)) <= set(lengths) and 5 <= np.mean(lengths) <= 6.5


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(rooms, "MAX_ATTEMPTS", 50)
    env = Sokoban(size=(3, 5), min_solution=9, split=None)
    with pytest.raises(ValueError, match=r"50 attempts for seed=4, size=\(3, 5\).*min_solution=9"):
        env.reset(4)


def test_draws_are_uniform_and_exact():
    draws = Draws(3, 0, rooms.TAG)
    counts = np.bincount([draws.below(6) for _ in range(6000)], minlength=6)
    assert len(counts) == 6 and abs(counts - 1000).max() < 150
    assert draws.below(1) == 0
    members = {draws.member(0b101001) for _ in range(60)}
    assert members == {0b1, 0b1000, 0b100000}
    # Philox4x64-10 with this key, straight from NumPy: 2 bits at a time, lowest first.
    word = int(np.random.Philox(key=5 | (0x50C0BA11 << 32 | 2) << 64).random_raw())
    fresh = Draws(5, 2, rooms.TAG)
    assert [fresh.below(4) for _ in range(32)] == [word >> 2 * i & 3 for i in range(32)]


def test_restarted_draws_are_those_of_new_ones():
    draws = Draws(5, 0, rooms.TAG)
    for attempt in (3, 0, 2**32 - 1):
        draws.below(1000)  # leaves bits behind
        draws.restart(attempt)
        new = Draws(5, attempt, rooms.TAG)
        assert [draws.below(1000) for _ in range(200)] == [new.below(1000) for _ in range(200)]


# ---- solver -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, count", [({}, 30), ({"size": (6, 7), "num_boxes": 2, "split": None}, 8)]
)
def test_plans_are_shortest(options, count):
    env = Sokoban(**options)
    for seed in range(count):
        state = env.reset(seed)
        assert len(env.solve(state)) == brute_force_length(env.grid_text(state))


def test_solver_on_any_position_met_in_random_play():
    """Random play makes dead positions, and the solver must call exactly those unsolvable."""
    env = Sokoban(num_boxes=1, split=None)
    rng = np.random.default_rng(5)
    lost = 0
    for seed in range(25):
        state = env.reset(seed)
        for action in rng.choice(env.actions, size=12):
            state = env.step(state, str(action), RNG).state
        plan = env.solve(state)
        assert (None if plan is None else len(plan)) == brute_force_length(env.grid_text(state))
        lost += plan is None
    assert 3 <= lost <= 22


def test_solver_limits_and_special_cases():
    env = Sokoban()
    assert env.solve(env.parse("P_√")) == ()
    assert env.solve(env.parse("P_XO")) == ("Right", "Right")
    assert env.solve(env.parse("P_XO"), max_moves=2) == ("Right", "Right")
    assert env.solve(env.parse("P_XO"), max_moves=1) is None
    assert env.solve(env.parse("#####\n#XPO#\n#####")) is None
    assert env.solve(env.parse("####\n#PO#\n#_X#\n####")) is None
    # Of the two orders, the solver takes the order that ends with the player on the lower cell
    # (see `_trace`).
    assert env.solve(env.parse("#######\n#OXPXO#\n#######")) == ("Right", "Left", "Left")


@pytest.mark.medium
def test_live_cells_by_pushing_from_every_cell():
    """A second implementation pushes forwards; a cell solvable for some player must be live."""
    env = Sokoban(split=None)
    for seed in range(10):
        room = env.reset(seed).room
        floor = {room.position(cell) for cell in cells(room.floor)}
        targets = {room.position(cell) for cell in cells(room.targets)}
        for box in cells(room.floor):
            live = bool(live_cells(room) >> box & 1)
            queue = [room.position(box)]
            for r, c in queue:
                for dr, dc in MOVES.values():
                    ahead = (r + dr, c + dc)
                    if {ahead, (r - dr, c - dc)} <= floor and ahead not in queue:
                        queue.append(ahead)
            assert live == (not targets.isdisjoint(queue))
            players = [cell for cell in cells(room.floor) if cell != box]
            tries = [env.grid_text(State(room, 1 << box, player)) for player in players]
            assert live or all(brute_force_length(text) is None for text in tries)


def test_ties_are_broken_as_documented():
    """Of three equal paths to the box, compared from the last action: Down comes before Right."""
    env = Sokoban()
    state = env.parse("P__\n___\n__X\n__O")
    assert env.solve(state) == ("Right", "Right", "Down", "Down")


# ---- splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"size": (5, 8), "num_boxes": 2}])
def test_symmetric_rooms_are_one_room(options):
    env = Sokoban(**options, split=None)
    for seed in range(30):
        text = env.grid_text(env.reset(seed))
        turned = images(text)
        assert canonical(text) == min(turned)
        assert {canonical(image) for image in turned} == {canonical(text)}
        assert {split_of(image) for image in turned} == {split_of(text)}


@pytest.mark.medium
def test_splits_share_no_room_and_have_their_shares():
    found = {}
    for split in SPLITS:
        env = Sokoban(split=split)
        texts = [env.grid_text(env.reset(seed)) for seed in range(300)]
        assert {split_of(text) for text in texts} == {split}
        found[split] = {canonical(text) for text in texts}
    assert SPLITS == ("imitation", "train", "eval")
    for a, b in (("imitation", "train"), ("imitation", "eval"), ("train", "eval")):
        assert not found[a] & found[b]
    drawn = {canonical(t) for t in (_any_room(seed) for seed in range(1500))}
    shares = {s: sum(split_of(t) == s for t in drawn) / len(drawn) for s in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


def _any_room(seed: int) -> str:
    env = Sokoban(split=None)
    return env.grid_text(env.reset(seed))


def test_a_played_room_stays_in_its_split():
    env = Sokoban(split="imitation")
    for seed in range(20):
        state = env.reset(seed)
        for action in env.solve(state):
            state = env.step(state, action).state
            assert split_of(env.grid_text(state)) == "imitation"


def test_explain_names_every_position_and_the_plan():
    env = Sokoban(size=(5, 6), num_boxes=2)
    state = env.parse("######\n#P_X_#\n#_√__#\n#_O__#\n######")
    # player (1, 1); boxes (1, 3) and (2, 2); targets (2, 2) and (3, 2)
    expected = "player 11 box 13 22 target 22 32 plan Up Down"
    assert env.explain(state, ["Up", "Down"]) == expected
