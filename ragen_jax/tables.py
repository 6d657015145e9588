"""Choices by name: a table is a dict, an entry says all there is to know of a choice."""


def look_up(table, what, name):
    """The entry of a table.

    Raises:
      ValueError: there is none of that name; the message says which there are.
    """
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name]
