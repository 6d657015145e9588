"""2048: slides and merges, new tiles, rewards, start boards, the scripted player, the splits."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.game_2048 import Game2048, board, split_of
from ragen_jax.envs.game_2048 import env as game_env
from ragen_jax.envs.game_2048.board import State
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import (
    Environment,
    GroundedEnvironment,
    ReversibleEnvironment,
    SolvableEnvironment,
)

pytestmark = pytest.mark.fast


BOARD = """\
2 2 4 _
_ 4 4 8
2 _ _ 2
16 _ 2 8"""

# sha256 of the grid texts of seeds 0..49 with default options. A different digest means that every
# board has changed, and with it warm starts, evaluation sets and resumed runs.
BOARDS_0_TO_49 = "6b7a0bb1b1a08557e71b4e977e361ac2b91e9023fe2f238df900d3feea159315"


def boards_digest() -> str:
    env = Game2048()
    texts = [env.grid_text(env.reset(seed)) for seed in range(50)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


class Uniform:
    """A generator that draws given numbers."""

    def __init__(self, *values):
        self.values = list(values)

    def random(self):
        return self.values.pop(0)


def slow_move(rows, action):
    """(rows, sum of merged tiles) by moving one tile one cell at a time, nearest to the edge first.

    Works for any direction on a grid of cells; a merged tile is marked until the move is over.
    """
    down, right = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}[action]
    grid = np.array(rows)
    marked = np.zeros_like(grid, bool)
    size, merged = len(grid), 0
    cells = list(itertools.product(range(size), repeat=2))
    for r, c in sorted(cells, key=lambda cell: -(cell[0] * down + cell[1] * right)):
        while grid[r, c]:
            to = r + down, c + right
            if not (0 <= to[0] < size and 0 <= to[1] < size):
                break
            if not grid[to]:
                grid[to], grid[r, c] = grid[r, c], 0
                r, c = to
            elif grid[to] == grid[r, c] and not marked[to]:
                grid[to] *= 2
                grid[r, c], marked[to] = 0, True
                merged += int(grid[to])
            else:
                break
    return tuple(map(tuple, grid.tolist())), merged


def random_board(rng, size) -> State:
    """A board with any number of tiles but few different values, so that many merge."""
    share, kinds = rng.random(), 1 + rng.integers(4)
    tiles = np.where(
        rng.random((size, size)) < share, 2 << rng.integers(kinds, size=(size,) * 2), 0
    )
    return State(tuple(map(tuple, tiles.tolist())))


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("game_2048", size=3, goal=32, start_tiles=4, min_sum=None, split="eval")
    for protocol in (Environment, SolvableEnvironment, ReversibleEnvironment, GroundedEnvironment):
        assert isinstance(env, protocol)
    assert env.actions == ("Up", "Down", "Left", "Right")
    assert ENVS["game_2048"] is Game2048
    assert env.grid_text(env.reset(1)).count("\n") == 2
    with pytest.raises(ValueError, match=r"'sides'.*accepted: size, goal, start_tiles, min_sum"):
        make_env("game_2048", sides=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 1}, "size must be .*at least 2, got 1"),
        ({"size": 7}, "size must be .*at most 6, got 7"),
        ({"size": (4, 4)}, r"size must be a whole number.*got \(4, 4\)"),
        ({"size": 4.0}, "size must be a whole number.*got 4.0"),
        ({"goal": 4}, "goal must be .*at least 8, got 4"),
        ({"goal": 96}, "goal must be a power of two, got 96"),
        ({"goal": 2**18}, "goal must be .*at most 131072, got 262144"),
        ({"goal": float("nan")}, "goal must be a whole number.*got nan"),
        ({"size": 2, "goal": 64}, "goal must be .*at most 32, got 64"),
        ({"start_tiles": 16}, "start_tiles must be .*at most 15, got 16"),
        ({"start_tiles": 1}, "start_tiles must be .*at least 2, got 1"),
        ({"start_tiles": True}, "start_tiles must be a whole number.*got True"),
        ({"min_sum": 129}, "min_sum must be .*at most 128, got 129"),
        ({"min_sum": 0}, "min_sum must be .*at least 1, got 0"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Game2048(**options)


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            Game2048().reset(seed)
    Game2048().reset(np.int64(2**63 - 1))


@pytest.mark.parametrize("action", ["up", "UP", "", "Jump", " Up", "Up || Down", "\ud800"])
def test_unknown_actions_are_refused(action):
    env = Game2048()
    with pytest.raises(ValueError, match="unknown action.*accepted: Up, Down, Left, Right"):
        env.step(env.parse(BOARD), action, None)


def test_state_is_frozen_and_hashable():
    env = Game2048()
    state = env.parse(BOARD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.rows = ()
    assert len({state, env.parse(BOARD), env.step(state, "Up", None).state}) == 2
    assert env.grid_text(state) == env.render(state) == BOARD


# ---- text ---------------------------------------------------------------------------------------


@pytest.mark.medium
@given(st.text("_248 \n", max_size=12))
@settings(max_examples=300, deadline=None)
def test_parse_is_exact_or_refuses(text):
    env = Game2048()
    try:
        state = env.parse(text)
    except ValueError:
        return
    assert env.grid_text(state) == text


@pytest.mark.parametrize(
    "text, message",
    [
        ("2 _\n_ 3", "unknown cell '3' at row 1, column 1"),
        ("2 _\n_ 02", "unknown cell '02' at row 1, column 1"),
        ("2 _\n0 _", "unknown cell '0' at row 1, column 0"),
        ("2 1\n_ _", "unknown cell '1' at row 0, column 1"),
        (f"2 _\n_ {2**5000}", "unknown cell '1"),
        ("2 \u00b2\n_ _", "unknown cell '\u00b2' at row 0, column 1"),
        ("2 _\n_", "row 1 has 1 cells where there are 2 rows"),
        ("2  _\n_ _", "row 0 has 3 cells where there are 2 rows"),
        ("2 _\n_ _\n", "row 0 has 2 cells where there are 3 rows"),
        ("_ _\n_ _", "at least one tile, found none"),
        ("", "unknown cell '' at row 0, column 0"),
    ],
)
def test_parse_says_what_is_wrong_and_where(text, message):
    with pytest.raises(ValueError, match=message):
        Game2048().parse(text)


def test_instructions_tell_the_options():
    env = Game2048(size=5, goal=256)
    for told in (*env.actions, "5 x 5", "a tile of 256", "divided by 256", "of 0.1 a 4", "_ is"):
        assert told in env.instructions
    assert "<" not in env.instructions and "{" not in env.instructions


# ---- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action, after, merged",
    [
        ("Left", "4 4 _ _\n8 8 _ _\n4 _ _ _\n16 2 8 _", 4 + 8 + 4),
        ("Right", "_ _ 4 4\n_ _ 8 8\n_ _ _ 4\n_ 16 2 8", 4 + 8 + 4),
        ("Up", "4 2 8 8\n16 4 2 2\n_ _ _ 8\n_ _ _ _", 4 + 8),
        ("Down", "_ _ _ _\n_ _ _ 8\n4 2 8 2\n16 4 2 8", 4 + 8),
    ],
)
def test_moves_by_hand(action, after, merged):
    env = Game2048()
    step = env.step(env.parse(BOARD), action, None)
    assert env.grid_text(step.state) == after
    assert step.reward == merged / 128 and not step.done
    assert step.info == {"success": False, "moved": True, "merged": merged}


@pytest.mark.parametrize(
    "line, after",
    [
        ((2, 2, 2, 0), (4, 2, 0, 0)),  # the pair nearest to the edge merges
        ((2, 2, 2, 2), (4, 4, 0, 0)),  # a merged tile does not merge again
        ((4, 2, 2, 0), (4, 4, 0, 0)),
        ((2, 0, 0, 2), (4, 0, 0, 0)),
        ((2, 4, 2, 4), (2, 4, 2, 4)),
        ((0, 0, 0, 8), (8, 0, 0, 0)),
        ((2, 2, 4, 8), (4, 4, 8, 0)),
    ],
)
def test_lines_by_hand(line, after):
    state = State((line, (0, 0, 0, 2), (0,) * 4, (0,) * 4))
    assert board.slide(state, "Left")[0].rows[0] == after


@pytest.mark.medium
def test_slides_and_merges_are_those_of_a_slow_rule():
    rng = np.random.Generator(np.random.Philox(1))
    for number in range(4000):
        state = random_board(rng, 2 + number % 5)
        for action in board.MOVES:
            after, merged = board.slide(state, action)
            assert (after.rows, merged) == slow_move(state.rows, action)
            pairs = board.merges(state, action)
            assert 2 * sum(tile for tile, _ in pairs) == merged
            assert all({state.rows[r][c] for r, c in cells} == {tile} for tile, cells in pairs)
            taken = [cell for _, cells in pairs for cell in cells]
            assert len(set(taken)) == len(taken) == 2 * len(pairs)
        assert state.is_stuck == all(slow_move(state.rows, a)[0] == state.rows for a in board.MOVES)


def test_a_new_tile_by_hand():
    env = Game2048()
    state = env.parse("2 2\n4 8")
    for cell, kind, grid in (
        (0.0, 0.5, "4 2\n4 8"),
        (0.99, 0.0999, "4 4\n4 8"),
        (0.5, 0.1, "4 2\n4 8"),
    ):
        assert env.grid_text(env.step(state, "Left", Uniform(cell, kind)).state) == grid
    wide = env.parse("2 _ _\n_ _ _\n_ _ _")
    # Eight empty cells, in reading order.
    assert env.grid_text(env.step(wide, "Down", Uniform(0.49, 0.5)).state) == "_ _ _\n2 _ _\n2 _ _"
    assert env.grid_text(env.step(wide, "Down", Uniform(0.99, 0.5)).state) == "_ _ _\n_ _ _\n2 _ 2"


def test_a_move_that_changes_nothing_costs_and_draws_nothing():
    env = Game2048()
    state = env.parse("2 4\n_ _")
    rng = generator(Purpose.ENVIRONMENT, 1, 2, 3)
    step = env.step(state, "Up", rng)
    assert (step.state, step.reward, step.done) == (state, -0.1, False)
    assert step.info == {"success": False, "moved": False, "merged": 0}
    assert rng.random() == generator(Purpose.ENVIRONMENT, 1, 2, 3).random()


@pytest.mark.medium
def test_new_tiles_are_2_with_9_of_10_in_any_empty_cell():
    """Drawn through `step`, with a separate generator per episode as in a rollout."""
    env = Game2048()
    state = env.parse("2 _ 4 _\n_ _ _ _\n_ 8 _ _\n_ _ _ 2")
    bare = env.step(state, "Down", None).state
    found = np.zeros((2, 4, 4), int)
    for member in range(20_000):
        rng = generator(Purpose.ENVIRONMENT, 5, member, 2**63)
        after = env.step(state, "Down", rng).state
        new = np.array(after.rows) - np.array(bare.rows)
        ((row, column),) = np.argwhere(new)
        found[new[row, column] // 2 - 1, row, column] += 1
    assert binomtest(int(found[1].sum()), 20_000, 0.1).pvalue > 1e-3
    empty = np.array(bare.rows) == 0
    assert found[:, ~empty].sum() == 0 and empty.sum() == 12
    for kind in found:
        assert chisquare(kind[empty]).pvalue > 1e-3


def test_members_of_a_group_share_the_board_and_meet_other_tiles():
    env = Game2048()
    ways = []
    for member in (0, 1, 0):
        state, rng = env.reset(3), generator(Purpose.ENVIRONMENT, 3, member, 7)
        for action in ("Up", "Left", "Down", "Right") * 3:
            state = env.step(state, action, rng).state
        ways.append(state)
    assert ways[0] == ways[2] != ways[1]


def test_the_goal_ends_the_game_and_pays_once():
    env = Game2048(goal=64, min_sum=None)
    step = env.step(env.parse("32 32\n2 2"), "Left", np.random.default_rng(0))
    assert step.reward == (64 + 4) / 64 + 1 and step.done
    assert step.info == {"success": True, "moved": True, "merged": 68}
    for action in env.actions:
        again = env.step(step.state, action, np.random.default_rng(0))
        assert (again.state, again.reward, again.done) == (step.state, 0.0, True)
        assert again.info["success"]


def test_a_board_without_moves_ends_the_game():
    env = Game2048()
    state = env.parse("4 8\n_ 4")
    stuck = env.step(state, "Left", Uniform(0.0, 0.5))  # 4 8 / 4 2: not stuck yet
    assert not stuck.done
    stuck = env.step(env.parse("4 8\n8 _"), "Right", Uniform(0.0, 0.5))  # 4 8 / 2 8: not stuck yet
    assert not stuck.done
    stuck = env.step(env.parse("4 8\n_ 2"), "Left", Uniform(0.0, 0.05))  # 4 8 / 2 4
    assert stuck.done and not stuck.info["success"] and stuck.reward == 0.0
    for action in env.actions:
        step = env.step(stuck.state, action, np.random.default_rng(0))
        assert (step.state, step.reward, step.done) == (stuck.state, 0.0, True)
        assert not step.info["success"]
    assert env.solve(stuck.state) is None


@pytest.mark.medium
@pytest.mark.parametrize("episodes", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_play_stays_within_the_rules(episodes):
    rng = np.random.Generator(np.random.Philox(2))
    wins = ends = 0
    kinds = [
        Game2048(),
        Game2048(size=2, goal=32, start_tiles=3, min_sum=None, split=None),
        Game2048(size=3, goal=64, start_tiles=6, min_sum=40, split=None),
    ]
    for episode in range(episodes):
        env = kinds[episode % len(kinds)]
        state = env.reset(episode)
        for _ in range(60):
            action = env.actions[rng.integers(4)]
            rows, merged = slow_move(state.rows, action)
            moved = rows != state.rows
            step = env.step(state, action, rng)
            assert env.parse(env.grid_text(step.state)) == step.state
            assert step.state.total - state.total in ((2, 4) if moved else (0,))
            assert step.info["success"] == (step.state.largest >= env.goal)
            if moved:
                assert step.reward == merged / env.goal + step.info["success"]
            else:
                assert step.reward == -0.1 and step.state == state
            assert step.done == (step.info["success"] or step.state.is_stuck)
            state = step.state
            if step.done:
                wins, ends = wins + step.info["success"], ends + 1
                break
    assert wins > episodes / 20 and ends - wins > episodes / 20


# ---- start boards -------------------------------------------------------------------------------


def test_boards_are_pinned():
    assert boards_digest() == BOARDS_0_TO_49


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 2, "goal": 8, "start_tiles": 3, "min_sum": 6, "split": None},
        {"size": 6, "goal": 2048, "start_tiles": 35, "min_sum": None, "split": "eval"},
        {"size": 3, "goal": 32, "start_tiles": 4, "min_sum": 16, "split": "imitation"},
    ],
)
def test_boards_are_as_asked(options):
    env = Game2048(**options)
    for seed in range(60):
        state = env.reset(seed)
        tiles = [tile for row in state.rows for tile in row if tile]
        assert [len(row) for row in state.rows] == [env.size] * env.size
        assert len(tiles) == env.start_tiles and sum(tiles) == state.total >= env.min_sum
        assert set(tiles) <= {2**k for k in range(1, env.goal.bit_length() - 2)}
        assert env.split in (None, split_of(state))
        assert not state.is_stuck


@pytest.mark.medium
def test_tiles_and_cells_are_uniform():
    env = Game2048(start_tiles=5, min_sum=None, split=None)
    tiles = np.array([env.reset(seed).rows for seed in range(3000)]).reshape(-1, 16)
    assert chisquare((tiles > 0).sum(0)).pvalue > 1e-3
    assert chisquare([(tiles == 2**k).sum() for k in range(1, 6)]).pvalue > 1e-3


def test_impossible_constraints_are_named(monkeypatch):
    monkeypatch.setattr(game_env, "MAX_ATTEMPTS", 50)
    env = Game2048(size=6, goal=2048, start_tiles=35, min_sum=35 * 256)
    with pytest.raises(ValueError, match=r"50 attempts for seed=4, size=6.*min_sum=8960"):
        env.reset(4)


# ---- the scripted player ------------------------------------------------------------------------


def test_plans_by_hand():
    env = Game2048(goal=64, min_sum=None)
    assert env.solve(env.parse("_ 32 32\n_ 2 _\n_ _ _")) == ("Left",)
    assert env.solve(env.parse("_ 32 _\n_ 2 _\n_ 32 2")) is not None
    assert env.solve(env.parse("64 2\n_ _")) == ()
    assert env.solve(env.parse("2 4\n4 2")) is None
    # Merged at once, although one move later would do as well.
    assert env.solve(env.parse("32 16 16\n_ _ _\n_ _ _")) == ("Left", "Left")


@pytest.mark.medium
def test_plans_are_moves_that_change_something():
    rng = np.random.Generator(np.random.Philox(4))
    env = Game2048(min_sum=None)
    for _ in range(150):
        state = random_board(rng, 4)
        plan = env.solve(state)
        assert env.solve(state) == plan
        assert (plan is None) == state.is_stuck
        for action in plan or ():
            step = env.step(state, action, None)
            assert step.info["moved"]
            state = step.state


@pytest.mark.medium
def test_the_player_reaches_the_goal_in_20_moves_and_random_moves_seldom_do():
    env = Game2048(split=None)
    wins = np.zeros(2, int)
    for seed, scripted in itertools.product(range(80), (0, 1)):
        rng = np.random.Generator(np.random.Philox(key=[seed, scripted]))
        state, moves, done = env.reset(seed), 0, False
        while moves < 20 and not done:
            plan = env.solve(state) if scripted else (env.actions[rng.integers(4)],)
            for action in plan[:2]:  # actions of one reply
                if not done:
                    step = env.step(state, action, rng)
                    state, done, moves = step.state, step.done, moves + 1
        wins[scripted] += step.info["success"]
    assert binomtest(int(wins[0]), 80, 0.17).pvalue > 1e-3
    assert binomtest(int(wins[1]), 80, 0.86).pvalue > 1e-3


# ---- splits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 3])
def test_symmetric_boards_are_one_board(size):
    env = Game2048(size=size, min_sum=None, split=None)
    for seed in range(30):
        state = env.reset(seed)
        grid = np.array(state.rows)
        turned = [np.rot90(g, k) for g in (grid, grid.T) for k in range(4)]
        images = [State(tuple(map(tuple, g.tolist()))) for g in turned]
        assert len(set(images)) == 8
        assert {env.identity(image) for image in images} == {env.identity(state)}
        assert {split_of(image) for image in images} == {split_of(state)}
    other = State(tuple(tuple(16 if tile == 8 else tile for tile in row) for row in state.rows))
    assert (env.identity(other) == env.identity(state)) == (other == state)


@pytest.mark.medium
def test_splits_share_no_board_and_have_their_shares():
    found = {}
    for split in SPLITS:
        env = Game2048(split=split)
        states = [env.reset(seed) for seed in range(300)]
        assert {split_of(state) for state in states} == {split}
        found[split] = {env.identity(state) for state in states}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    env = Game2048(split=None)
    drawn = [split_of(env.reset(seed)) for seed in range(1000)]
    shares = {split: drawn.count(split) / 1000 for split in SPLITS}
    assert shares == pytest.approx({"imitation": 0.4, "train": 0.4, "eval": 0.2}, abs=0.05)


@pytest.mark.medium
def test_boards_vary_and_reset_is_pure():
    env = Game2048(split="eval")
    states = [env.reset(seed) for seed in range(1100)]
    assert Game2048(split="eval").reset(7) == states[7]
    assert len({env.identity(state) for state in states}) >= 1024


# ---- grounded statements ------------------------------------------------------------------------


def test_explain_names_the_largest_tiles_what_merges_and_the_plan():
    env = Game2048()
    state = env.parse(BOARD)
    said = "tile 16 30 tile 8 13 33 merge 4 11 12 merge 2 00 01 merge 2 20 23 plan Left Up"
    assert env.explain(state, ["Left", "Up"]) == said
    assert env.explain(state, []) == "tile 16 30 tile 8 13 33 plan"


@pytest.mark.medium
@pytest.mark.parametrize("size, goal", [(2, 16), (4, 128), (6, 2048)])
def test_what_the_expert_says_is_so(size, goal):
    env = Game2048(size=size, goal=goal, min_sum=None, start_tiles=size**2 - 2, split=None)
    for seed in range(60):
        state = env.reset(seed)
        message = f"Your last reply.\n{env.render(state)}\nYou have 2 action(s) left."
        right, stated = env.count_grounded(message, env.explain(state, env.solve(state)))
        assert right == stated >= 1


@pytest.mark.parametrize(
    "thought, found",
    [
        ("tile 16 30 tile 8 13 33 merge 4 11 12 plan Left 11", (5, 5)),
        ("tile 16 03 tile 8 13", (1, 2)),
        ("The 16 tile is at (3, 0), the 2 tiles are at (0, 0), (0, 1) and (3, 1)", (3, 4)),
        ("Empty: (0, 3), (1, 0), (3, 3)", (2, 3)),
        ("tile 32 30", (0, 1)),
        ("move the tile 16 to 31", (0, 0)),  # a plan
        ("16 is large, 30 is a corner", (0, 0)),
        ("tile 3 11", (0, 0)),  # no such tile exists
        ("tile 16 99", (0, 1)),
    ],
)
def test_grounded_by_hand(thought, found):
    env = Game2048()
    message = f"Your last reply could not be read.\n{BOARD}\nYou have 2 action(s) left."
    assert env.count_grounded(message, thought) == found


@pytest.mark.medium
@pytest.mark.parametrize(
    "thought",
    ["", "tile " * 200_000, "tile 16 ," * 100_000, "1" * 10**6, "tile 16" + " " * 10**6]
    + ["\ud800 tile \udfff", "tile 16 \uff13\uff10", "\x00", "tile \u00b2 00", "瓦 16 30"],
    ids=range(10),
)
def test_hostile_thoughts_are_survived(thought):
    env = Game2048()
    assert env.count_grounded(BOARD, thought) == (0, 0)
