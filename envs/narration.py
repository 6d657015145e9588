"""Parts of the sentences that `narrate` writes, and of the patterns that recognise them."""

from collections.abc import Iterable, Sequence

# A position as `describe_cell` writes it, and a list of positions.
CELL = r"\([0-9]{1,2},[0-9]{1,2}\)"
CELLS = rf"{CELL}(?:(?:, {CELL})* and {CELL})?"


def enumerate_words(words: Sequence[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def describe_cell(cell: tuple[int, int]) -> str:
    """Return a (row, column) as "(2,3)", which has fewer tokens than "(2, 3)"."""
    row, column = cell
    return f"({row},{column})"


def describe_cells(cells: Iterable[tuple[int, int]]) -> str:
    """Return positions as "(2,3), (3,3) and (4,1)"."""
    return enumerate_words([describe_cell(cell) for cell in cells])


def describe_things(one: str, several: str, cells: Sequence[tuple[int, int]]) -> str:
    """Return things and their positions: "box at (2,3)", or "boxes at (2,3) and (3,3)"."""
    return f"{one if len(cells) == 1 else several} at {describe_cells(cells)}"


def describe_plan(plan: Sequence[str]) -> str:
    """Return a plan as a sentence after another one, " The plan is Down, Right."; "" if empty."""
    return f" The plan is {', '.join(plan)}." if plan else ""


def plan_pattern(actions: Iterable[str]) -> str:
    """Return the pattern of `describe_plan` for actions that hold no special characters."""
    action = f"(?:{'|'.join(actions)})"
    return rf"(?: The plan is {action}(?:, {action})*\.)?"
