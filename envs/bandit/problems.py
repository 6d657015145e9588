"""Arms, problems from seeds, and which split a problem belongs to."""

from dataclasses import dataclass

from ragen_jax.envs.bandit.names import CONNOTATIONS, NAMES
from ragen_jax.envs.problems import Draws, split_by_hash

TAG = 0xBA4D1717  # of this environment's `Draws`


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm that pays `pay` with `chance` and nothing otherwise, both in hundredths."""

    name: str
    pay: int
    chance: int

    @property
    def expected(self) -> int:
        """What a pull pays on average, in ten-thousandths."""
        return self.pay * self.chance


@dataclass(frozen=True, slots=True)
class State:
    """Arms in the order shown, and (number of the arm, hundredths paid) of every pull so far.

    None for the arm where an answer named none.
    """

    arms: tuple[Arm, ...]
    pulled: tuple[tuple[int | None, int], ...] = ()

    def is_best(self, number: int | None) -> bool:
        """Whether no arm pays more on average than this one."""
        if number is None:
            return False
        return self.arms[number].expected == max(arm.expected for arm in self.arms)


def draw_problem(
    draws: Draws, *, arms: int, names: str, sure: tuple[int, int], chance: tuple[int, int]
) -> State | None:
    """One attempt: a problem of any split; None where all arms pay as much on average.

    Half of the arms, rounded down, are risky. All bounds are inclusive, in hundredths.

    sure: of a sure arm's pay, uniform; chance: of a risky arm's chance to pay 1, uniform
    """
    risky = arms // 2
    left = {kind: list(NAMES[kind]) for kind in CONNOTATIONS[names]}
    drawn = []
    for number in range(arms):
        pool = left[CONNOTATIONS[names][number < risky]]
        name = pool.pop(draws.below(len(pool)))
        low, high = chance if number < risky else sure
        amount = low + draws.below(high - low + 1)
        drawn.append(Arm(name, 100, amount) if number < risky else Arm(name, amount, 100))
    state = State(tuple(draws.shuffled(drawn)))
    return None if all(map(state.is_best, range(arms))) else state


def identity(state: State) -> str:
    """The same for problems that differ in the order of their arms only."""
    return ", ".join(sorted(f"{arm.name} {arm.pay} {arm.chance}" for arm in state.arms))


def split_of(state: State) -> str:
    """The split of a problem: a hash of its identity."""
    return split_by_hash("bandit", identity(state))
