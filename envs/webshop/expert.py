"""The expert: its way to a product that fits, and its reasoning."""

import re
from collections.abc import Sequence

from ragen_jax.envs.webshop import pages
from ragen_jax.envs.webshop.catalogue import Product
from ragen_jax.envs.webshop.goals import NO_CAP, Goal
from ragen_jax.envs.webshop.pages import Layout, Visit
from ragen_jax.envs.webshop.search import MAX_RESULTS
from ragen_jax.envs.webshop.shop import Shop

WORDS = (
    *("search[", "click[", "]", "[", "find", " find", " below ", " take"),
    *("want", " want", " have", " so"),
    *("WebShop [SEP] Instruction: [SEP]", "Instruction: [SEP]", " i am looking for", " with"),
    *(", and price lower than ", ".00 dollars", ", and", ":", ",", ".00"),
    *(" [SEP] Search", " [SEP] Back to Search", " [SEP] Page ", " (Total results: ", ")"),
    *(" [SEP] Next >", " [SEP] < Prev", " [SEP] B0", " [SEP]", " [SEP] $", ".0"),
    *(" [SEP] Price: $", " [SEP] Rating: N.A."),
    " [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now",
    *("You have clicked", ".\n", "b0", " b0", " next >", "next >", "< prev", "buy now", " buy now"),
    *("back to search", "Thank you for shopping with us!"),
)


_CLAIM = re.compile(
    r"\b(find|want|have|below)\s+(.*?)(?=\s+(?:find|want|have|below|take|so)\b|$)", re.DOTALL
)
_INSTRUCTION = re.compile(r"Instruction: \[SEP\] (.*?)(?: \[SEP\]|$)", re.DOTALL)
_CLICKED = re.compile(r"^You have clicked (.*)\.$", re.MULTILINE)
MAX_THOUGHT = 10_000  # characters of reasoning that are checked


def query(shop: Shop, visit: Visit) -> str:
    """Return the expert's search: the attributes asked for, and the kind of product."""
    product = shop.products[visit.goal.place]
    return " ".join((*visit.goal.attributes, product.query))


def choices(product: Product, goal: Goal) -> dict[str, str] | None:
    """Return {option name: value} to choose for a product; None if it lacks a wanted pair.

    Values that people wrote, which a product need not have, are chosen if they are offered.
    """
    offered, chosen = dict(product.options), {}
    for option in goal.options:
        if isinstance(option, tuple):
            name, value = option
            if value not in offered.get(name, ()):
                return None
            chosen[name] = value
        else:
            names = [name for name, values in product.options if option in values]
            chosen |= {name: option for name in names[-1:]}
    return chosen


def fits(shop: Shop, place: int, goal: Goal) -> bool:
    """Whether the expert takes a product: the goal's product, or one whose title fits as well."""
    if place == goal.place:
        return True
    product, wanted = shop.products[place], shop.products[goal.place]
    title = product.title.lower()
    return (
        product.query == wanted.query
        and all(attribute in title for attribute in goal.attributes)
        and product.price <= goal.cap
        and choices(product, goal) is not None
    )


def plan(shop: Shop, visit: Visit, layout: Layout) -> tuple[str, ...] | None:
    """Return the actions from a visit to a purchase that fits; () after a purchase."""
    if visit.page == pages.BOUGHT:
        return ()
    if visit.page == pages.START:
        return _plan_from_start(shop, visit, layout)
    if visit.page == pages.RESULTS:
        return _plan_from_results(shop, visit, layout) or _plan_new_search(shop, visit, layout)
    choose = choices(shop.products[visit.place], visit.goal) or {}
    clicked = dict(visit.options)
    # Options cannot be deselected.
    if fits(shop, visit.place, visit.goal) and set(clicked) <= set(choose):
        missing = [value for name, value in choose.items() if clicked.get(name) != value]
        back = () if visit.page == pages.ITEM else (_click(pages.PREVIOUS),)
        return (*back, *map(_click, missing), _click(pages.BUY))
    if visit.page != pages.ITEM:
        return _plan_new_search(shop, visit, layout)
    found = Visit(visit.goal, pages.RESULTS, visit.query, visit.number)
    actions = _plan_from_results(shop, found, layout)
    if actions is None:
        return _plan_new_search(shop, visit, layout)
    return (_click(pages.PREVIOUS), *actions)


def _click(label: str) -> str:
    return f"click[{label}]"


def _plan_new_search(shop: Shop, visit: Visit, layout: Layout) -> tuple[str, ...] | None:
    """Return the actions through a new search; None if no search finds a product that fits."""
    actions = _plan_from_start(shop, Visit(visit.goal), layout)
    return None if actions is None else (_click(pages.BACK), *actions)


def _plan_from_start(shop: Shop, visit: Visit, layout: Layout) -> tuple[str, ...] | None:
    """Return the actions of the first search that finds a fit: by `query`, or by the title."""
    for text in (query(shop, visit), shop.products[visit.goal.place].title.lower()):
        actions = _plan_from_results(shop, Visit(visit.goal, pages.RESULTS, text), layout)
        if actions is not None:
            return (f"search[{text}]", *actions)
    return None


def _plan_from_results(shop: Shop, visit: Visit, layout: Layout) -> tuple[str, ...] | None:
    """Return the actions from a page of results; None if none of the products found fits.

    They lead to the nearest page with a product that fits, and to the first such product there.
    """
    found = shop.find(visit.query)[:MAX_RESULTS].tolist()
    fitting = [rank for rank, place in enumerate(found) if fits(shop, place, visit.goal)]
    if not fitting:
        return None
    turns, rank = min(
        ((rank // layout.per_page + 1 - visit.number, rank) for rank in fitting),
        key=lambda pair: abs(pair[0]),
    )
    product = shop.products[found[rank]]
    choose = (choices(product, visit.goal) or {}).values()
    turn = pages.NEXT if turns > 0 else pages.PREVIOUS
    labels = [turn] * abs(turns) + [product.asin.lower(), *choose, pages.BUY]
    return tuple(map(_click, labels))


def thought(shop: Shop, visit: Visit, layout: Layout, actions: Sequence[str]) -> str:
    """Return the expert's reasoning before it follows `actions`."""
    label = actions[0].partition("[")[2].removesuffix("]") if actions else ""
    search_text = f"find {query(shop, visit)}"
    if visit.page == pages.START:
        return search_text
    if visit.page == pages.RESULTS:
        below = "" if visit.goal.cap == NO_CAP else f" below {visit.goal.cap:.2f}"
        if label in pages.LABEL_TEXTS:
            return f"{search_text}{below} so {label}"
        titles = [
            product.title
            for product in pages.results(shop, visit, layout).values()
            if product.asin.lower() == label
        ]
        return " ".join([f"{search_text}{below} take {label}", *titles[:1]])
    wanted = [x if isinstance(x, str) else x[1] for x in visit.goal.options]
    wants = [f"want {', '.join(wanted)}"] if wanted else []
    has = [f"have {', '.join(v for _, v in visit.options)}"] if visit.options else []
    return " ".join([*wants, *has, f"so {label}"])


def count_grounded(observation: str, thought: str) -> tuple[int, int]:
    """Return (number of facts in `thought` that a page shows, number of facts stated).

    Facts are stated as in `thought()`. Each word after "find" and each value after "want" must be
    in the instruction, as must the price after "below"; each value after "have" must have been
    clicked.
    """
    instruction_match = _INSTRUCTION.search(observation)
    instruction = instruction_match[1].lower() if instruction_match else ""
    words = set(re.findall(r"\w+", instruction))
    shown = _CLICKED.search(observation)
    clicked = shown[1].lower().split(", ") if shown else []
    facts = []
    for kind, claim in _CLAIM.findall(thought[:MAX_THOUGHT].lower()):
        if kind == "find":
            facts += [word in words for word in re.findall(r"\w+", claim)]
        elif kind == "below":
            facts.append(f"price lower than {claim} dollars" in instruction)
        else:
            where = instruction if kind == "want" else clicked
            facts += [value in where for value in claim.split(", ")]
    return sum(facts), len(facts)
