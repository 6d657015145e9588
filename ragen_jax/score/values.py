"""Parse the values of a row: rules for missing values, numbers, booleans and text.

Every format reads its fields through these functions, so that a value means the same in each. A
value is missing if the field is absent, null, NaN, empty text, or one of MISSING_TEXT in any case.
Numbers, booleans, lists and objects may be given as text, as in tables and CSV exports.
"""

import ast
import collections
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from ragen_jax.storage.limits import parse_json

MAX_REPR = 16 << 20  # largest number of characters of a parsed Python expression
MAX_REPR_VALUES = 1_000_000
MISSING_TEXT = ("nan", "none", "null", "<na>", "nat")
BOOLEAN_TEXT = {"true": True, "false": False}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_STEP = re.compile(r"(?:global[_\- ]?)?step[_\- ]?(\d+)", re.IGNORECASE)
MAX_REWARD = 1e15  # largest reward of a row; larger squares would overflow a float32 variance
MOST = 2**32 - 1  # largest step, a 32-bit word of the random streams, and largest token id


class Fields:
    """The fields of an object, which track whether a reader used them.

    Objects inside a row share their row's record: `unread` returns all fields of the row and of its
    opened objects that no reader used, such as `metadata.env_id` or `turns[].valid`.
    """

    def __init__(
        self, values: Mapping[str, Any], path: str = "", row: "Fields | None" = None
    ) -> None:
        self.values, self.path = values, path
        self._seen: set[str] = row._seen if row else set()
        self._read: set[str] = row._read if row else set()
        # Number of parts of the row, by kind, that a reader left out.
        self.left_out: collections.Counter[str] = row.left_out if row else collections.Counter()
        self._seen |= {path + str(name) for name in values}

    @property
    def unread(self) -> set[str]:
        """Return the paths of the fields that no reader used."""
        return self._seen - self._read

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null; an empty text is a value here."""
        return not _is_null(self.values.get(name))

    def mark_read(self, name: str) -> None:
        """Record that a field was read."""
        self._read.add(self.path + name)

    def leave_out(self, what: str, count: int = 1) -> None:
        """Record that parts of the row are not scored; `what` names them, in the plural."""
        if count:
            self.left_out[what] += count

    def get(self, name: str) -> Any:
        """Return the value of a field and record it as read; None if it is missing."""
        self.mark_read(name)
        value = self.values.get(name)
        return None if is_missing(value) else value

    def object(self, name: str) -> "Fields | None":
        """Return the object in a field, or None if the field holds anything else."""
        value = parse_nested(self.values.get(name))
        if not isinstance(value, dict):
            return None
        self.mark_read(name)
        return Fields(value, f"{self.path}{name}.", self)

    def objects(self, name: str) -> list["Fields"]:
        """Return the objects of a list, at least one.

        Raises:
          ValueError: the field holds anything else.
        """
        value = parse_nested(self.get(name))
        if not isinstance(value, list) or not value or not all(isinstance(x, dict) for x in value):
            raise ValueError(f"has {format_value(value)} as its {name}; expected a list of objects")
        return [Fields(each, f"{self.path}{name}[].", self) for each in value]


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: null, NaN, empty text, or text that means missing."""
    if isinstance(value, str):
        return value.strip().lower() in ("", *MISSING_TEXT)
    return _is_null(value)


def _is_null(value: Any) -> bool:
    return value is None or isinstance(value, float | Decimal) and math.isnan(value)


def parse_nested(value: Any) -> Any:
    """Parse a list or an object given as text (JSON, or Python's repr); else return the value."""
    if not isinstance(value, str) or value.strip()[:1] not in ("[", "{"):
        return value
    try:
        return parse_json(value)
    except (ValueError, RecursionError):
        pass  # it may be Python's repr, which pandas writes
    # A parsed expression takes hundreds of bytes for each of its values.
    if len(value) > MAX_REPR or sum(map(value.count, ",[{:(")) > MAX_REPR_VALUES:
        return value
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in a text that is not a repr
            found = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value
    return found if isinstance(found, list | dict) else value


def is_number(value: Any) -> bool:
    """Return whether `number` accepts a value; booleans count, missing values do not."""
    if is_missing(value):
        return False
    try:
        return number(value, "value") is not None
    except ValueError:
        return False


def number(value: Any, name: str) -> float | None:
    """Return a finite number (true is 1, false is 0), or None if it is missing.

    Raises:
      ValueError: anything else.
    """
    if is_missing(value):
        return None
    found: Any = value
    if isinstance(value, str):
        text = value.strip()
        found = BOOLEAN_TEXT.get(text.lower())
        if found is None and _NUMBER.fullmatch(text):
            found = float(text)
    try:
        result = float(found) if isinstance(found, int | float | Decimal) else math.inf
    except OverflowError:  # an integer beyond float64
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"has {format_value(value)} as its {name}; expected a finite number")
    return result


def reward(value: float | None) -> float | None:
    """Return the reward of a row, or None if it has none.

    Raises:
      ValueError: it is beyond MAX_REWARD.
    """
    if value is not None and not abs(value) <= MAX_REWARD:
        raise ValueError(
            f"has a reward of {value:g}; expected one from -{MAX_REWARD:g} to {MAX_REWARD:g}"
        )
    return value


def total(value: Any, name: str) -> float | None:
    """Return a reward, or None if any part of it is missing.

    It is a number; the sum of a list of numbers (of turns or tokens); or the sum of an object
    {name: number} or {name: {"score", "weight"}} (the weight defaults to 1).

    Raises:
      ValueError: anything else.
    """
    value = parse_nested(value)
    if isinstance(value, list):
        parts = [number(each, name) for each in value]
    elif isinstance(value, dict):
        parts = [_weighted(each, f"{name}.{key}") for key, each in value.items()]
    else:
        return number(value, name)
    given = [part for part in parts if part is not None]
    return add_rewards(given) if given and len(given) == len(parts) else None


def one_reward(rewards: Fields) -> float | None:
    """Return the reward in an object {name: reward}: its `reward`, or its only value.

    Raises:
      ValueError: there are several, and none is called `reward`; or a value is not a number.
    """
    given = [name for name, value in rewards.values.items() if not is_missing(value)]
    if "reward" in given:
        given = ["reward"]
    if len(given) > 1:
        raise ValueError(
            f"has the rewards {', '.join(map(repr, given))}; name those to add up with "
            "--reward=NAME,..."
        )
    return number(rewards.get(given[0]), given[0]) if given else None


def add_rewards(parts: Sequence[float]) -> float:
    """Return the sum of a reward's parts; infinity if it is beyond float64."""
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):  # large parts; infinities of both signs
        return math.inf


def _weighted(value: Any, name: str) -> float | None:
    if not isinstance(value, dict):
        return number(value, name)
    if "score" not in value:
        raise ValueError(f"has a reward {name} without a score")
    score, weight = number(value["score"], name), number(value.get("weight"), f"{name}.weight")
    return None if score is None else score * (1.0 if weight is None else weight)


def boolean(value: Any, name: str) -> bool | None:
    """Return true or false, or None if missing or a number other than 0 and 1 (a score).

    Raises:
      ValueError: neither a boolean nor a number.
    """
    try:
        found = number(value, name)
    except ValueError as error:
        raise ValueError(
            f"has {format_value(value)} as its {name}; expected true or false"
        ) from error
    return bool(found) if found in (0, 1) else None


def whole(value: Any, name: str) -> int | None:
    """Return an integer in [0, 2**32), or None if it is missing.

    Raises:
      ValueError: anything else, booleans included.
    """
    if is_missing(value):
        return None
    found: Any = value.strip() if isinstance(value, str) else value
    if isinstance(found, str) and found.isdecimal():
        found = int(found) if len(found) < 32 else MOST + 1
    elif not isinstance(found, int) and is_number(found):
        found = number(found, name)
    is_whole = isinstance(found, int | float) and not isinstance(found, bool) and found % 1 == 0
    if not is_whole or isinstance(value, str) and value.strip().lower() in BOOLEAN_TEXT:
        raise ValueError(f"has the {name} {format_value(value)}; expected a whole number from 0")
    if not 0 <= found <= MOST:
        raise ValueError(
            f"has the {name} {format_value(value)}; expected a number from 0, below 2**32"
        )
    return int(found)


def step(value: Any) -> int | None:
    """Return the number of a step, or of text such as "global_step_4"; None if it is missing.

    Raises:
      ValueError: anything else.
    """
    named = _STEP.fullmatch(value.strip()) if isinstance(value, str) else None
    return whole(named[1] if named else value, "step")


def label(value: Any) -> str | None:
    """Return the name of a group, or None if it is missing. 3, 3.0 and "3" are the same name."""
    if is_missing(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def ids(value: Any, name: str) -> list[int]:
    """Return token ids.

    Raises:
      ValueError: not a list of integers of at least 0.
    """
    found = parse_nested(value)
    if isinstance(found, list) and all(type(each) is int and 0 <= each <= MOST for each in found):
        return found
    try:
        numbers = [whole(each, name) for each in found] if isinstance(found, list) else [None]
    except ValueError:
        numbers = [None]
    result = [each for each in numbers if each is not None]
    if len(result) < len(numbers):
        raise ValueError(f"has {format_value(value)} as its {name}; expected token ids")
    return result


def texts(value: Any) -> tuple[str, ...] | None:
    """Return the texts of a list, or a single text as a tuple; None if missing."""
    found = parse_nested(value)
    if is_missing(found):
        return None
    return tuple(map(str, found)) if isinstance(found, list) else (str(found),)


def first(scopes: Sequence[Fields], names: Sequence[str]) -> Iterator[tuple[Fields, str, Any]]:
    """Yield (object, name, value) of fields that are not missing, ordered by name, then object.

    Only fields up to the point where the caller stops count as read.
    """
    for name in names:
        for fields in scopes:
            if name in fields.values:
                value = fields.get(name)
                if value is not None:
                    yield fields, name, value


def format_value(value: Any) -> str:
    """Format a value for an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deep list
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= 60 else f"{text[:57]}..."
