"""Arms, problems from seeds, and the split of a problem."""

from dataclasses import dataclass

from ragen_jax.envs.bandit.names import CONNOTATIONS, NAMES
from ragen_jax.envs.problems import Draws, split_by_hash

TAG = 0xBA4D1717  # tag of this environment's `Draws`


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm that pays `pay` with probability `chance`, else nothing; both in hundredths."""

    name: str
    pay: int
    chance: int

    @property
    def expected_pay(self) -> int:
        """Expected pay of a pull, in ten-thousandths."""
        return self.pay * self.chance


@dataclass(frozen=True, slots=True)
class State:
    """Arms in the order shown, and (index of the arm, hundredths paid) of every pull so far.

    The index is None if the answer named no arm.
    """

    arms: tuple[Arm, ...]
    history: tuple[tuple[int | None, int], ...] = ()

    def is_best(self, number: int | None) -> bool:
        """Whether no arm has a higher expected pay than this arm."""
        if number is None:
            return False
        return self.arms[number].expected_pay == max(arm.expected_pay for arm in self.arms)


def draw_problem(
    draws: Draws, *, arms: int, names: str, sure: tuple[int, int], chance: tuple[int, int]
) -> State | None:
    """Make one attempt at a problem of any split; None if all arms have the same expected pay.

    Half of the arms, rounded down, are risky. All bounds are inclusive, in hundredths.

    sure: bounds of a sure arm's pay, drawn uniformly
    chance: bounds of a risky arm's probability of paying 1, drawn uniformly
    """
    risky = arms // 2
    unused_names = {kind: list(NAMES[kind]) for kind in CONNOTATIONS[names]}
    drawn_arms = []
    for number in range(arms):
        pool = unused_names[CONNOTATIONS[names][number < risky]]
        name = pool.pop(draws.below(len(pool)))
        low, high = chance if number < risky else sure
        amount = low + draws.below(high - low + 1)
        drawn_arms.append(Arm(name, 100, amount) if number < risky else Arm(name, amount, 100))
    state = State(tuple(draws.shuffled(drawn_arms)))
    return None if all(map(state.is_best, range(arms))) else state


def identity(state: State) -> str:
    """Return a text that is the same for problems that differ only in the order of their arms."""
    return ", ".join(sorted(f"{arm.name} {arm.pay} {arm.chance}" for arm in state.arms))


def split_of(state: State) -> str:
    """Return the split of a problem, from a hash of its identity."""
    return split_by_hash("bandit", identity(state))
