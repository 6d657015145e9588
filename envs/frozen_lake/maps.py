"""Maps from seeds, and the split of a map.

As in the released RAGEN, the player starts on a random cell and the goal is on another random cell
(Gymnasium's own maps run from corner to corner). Every other cell is frozen with a given
probability.
"""

from ragen_jax.envs.frozen_lake.lake import Lake, State
from ragen_jax.envs.problems import Draws, canonical_grid, split_by_hash

TAG = 0x0F202E17  # tag of this environment's `Draws`


def draw_map(draws: Draws, size: tuple[int, int], frozen: float) -> State:
    """Make one attempt at a map of (rows, columns), which may be unsolvable.

    `frozen` is the probability that a cell is ice rather than a hole, to 32 bits.
    """
    rows, columns = size
    cells = rows * columns
    start = draws.below(cells)
    goal = (start + 1 + draws.below(cells - 1)) % cells
    threshold = round(frozen * 2**32)
    letters = ["F" if draws.below(2**32) < threshold else "H" for _ in range(cells)]
    letters[start], letters[goal] = "F", "G"
    text = "".join(letters)
    return State(Lake(tuple(text[i : i + columns] for i in range(0, cells, columns))), start)


def split_of(state: State) -> str:
    """Return the split of a map, from a hash of its holes and goal up to symmetry.

    The player's position does not count: every state of an imitated episode stays in the imitation
    split.
    """
    return split_by_hash("frozen_lake", canonical_grid("\n".join(state.lake.rows)))
