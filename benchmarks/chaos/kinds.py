"""All kinds of faults (each family has a file), and the setups with the twins for comparison."""

import dataclasses
from collections.abc import Callable

from benchmarks.chaos import clocks, consoles, damage, disks, environments, links, servers, stops
from benchmarks.chaos.trial import Setup, Trial

SETUPS: dict[str, Setup] = {
    "plain": Setup(),
    "two processes": Setup(processes=2),
    "searching": servers.SETUP,
    **environments.SETUPS,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    strike: Callable[[Trial], None]  # raises Failure if the run did not survive as promised
    setup: str = "plain"  # key of SETUPS


FAMILIES = (
    ("plain", stops.STOPS),
    ("plain", damage.DAMAGE),
    ("plain", disks.DISKS),
    ("plain", consoles.CONSOLES),
    ("breaking", consoles.WITH_ERRORS),
    ("plain", links.LINKS),
    ("plain", clocks.CLOCKS),
    ("breaking", environments.WITH_ERRORS),
    ("grading", environments.WITH_REWARD),
    ("hostile", environments.WITH_TEXTS),
    ("comparing", stops.WITH_WORKER),
    ("searching", servers.SERVERS),
    ("two processes", stops.TWO_PROCESS_STOPS),
)
KINDS = {name: Kind(strike, setup) for setup, family in FAMILIES for name, strike in family.items()}
