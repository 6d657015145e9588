"""WebShop for language agents (Yao et al. 2022), within the process: search a shop, choose and buy.

The rules are those of the text mode of princeton-nlp/WebShop, the splits of goals those of RAGEN's
wrapper; deviations are noted where they occur. The files that hold the rules name their sources.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ragen_jax.envs.options import file_name, flag, one_of, problem_seed, whole
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import Step
from ragen_jax.envs.webshop import catalogue, expert, files, pages, reward, search, shop_cache
from ragen_jax.envs.webshop.goals import identity
from ragen_jax.envs.webshop.pages import Layout, Visit
from ragen_jax.envs.webshop.shop import Shop, generated_shop

MAX_PER_PAGE = search.MAX_RESULTS
MAX_QUERY = 1000  # characters of a query that are used

_ACTION = re.compile(r"(search|click)\[(.+)\]")

_RULES = """\
You are shopping on a website. Find a product that fits the instruction on the page, choose the \
options that it asks for, and buy it within the price that it names.
A page is shown as its texts with [SEP] between them. There are two actions, one an answer:
search[words] looks for products; it works on the first page, where there is a box to search in. \
Words for what the product is find more than its color or size do.
click[label] follows a link, chooses an option or presses a button: the name of a product, such \
as b01234, a value of an option, or one of back to search, < prev, next >, description, features, \
reviews, buy now.
An action that the page does not have changes nothing. Options are chosen one by one, before buy \
now, which ends the task: it earns up to 1, by how much of the type, attributes, options and price \
of the product is what was asked for. Nothing else earns anything, so buy before your answers \
run out, something that nearly fits if need be."""

# The rules of `WebShop.brief`.
_BRIEF = """\
Buy a product that fits the instruction, with the options that it asks for, within its price. The \
answer is one action:
search[words] on the first page, or click[label] for a link, option or button of the page.{buttons}
Choose the options one by one, then click[buy now], which ends the task. Buy before your answers \
run out."""


class WebShop:
    """A shop of generated products, or of the data set's; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    products: number of products of the generated catalogue
    catalogue_seed: seed of its products and of the price caps of the goals
    options: maximum number of options (color, size, ...) of a generated product, 0 to 2; it has
        this number or one less
    per_page: products per page of results
    show_attributes: whether a product's page has a button that shows its attributes
    show_choices: whether a page is followed by its available actions, as RAGEN shows it
    show_clicked: whether a product's page lists the options chosen. A page of WebShop's text mode
        does not; an agent that sees one turn at a time needs it
    binary: whether a purchase earns 1 only if the published rule gives 1, and else 0 (as in the
        released RAGEN), or the published rule's value (as in the paper)
    path, attributes_path: the data set's files of products (items_shuffle*.json) and of their
        attributes (items_ins_v2*.json); products and options are then unused
    instructions_path: its file of people's requests (items_human_ins.json); None: goals are made
        from the attributes file, as in the released runs
    nouns_path: JSON object asin -> list of the nouns of its title, for the reward; None: the words
        of titles take their place (`reward.title_words`)
    split: "imitation", "train" or "eval": three disjoint sets of goals; for the files, RAGEN's
        test, training and validation goals; None: all of them
    """

    actions: tuple[str, ...] = ()
    instructions: str = _RULES
    fields: tuple[str, ...] = files.FIELDS

    def __init__(
        self,
        products: int = 1000,
        catalogue_seed: int = 0,
        options: int = catalogue.MAX_OPTIONS,
        per_page: int = 10,
        show_attributes: bool = False,
        show_choices: bool = True,
        show_clicked: bool = False,
        binary: bool = False,
        path: str | Path | None = None,
        attributes_path: str | Path | None = None,
        instructions_path: str | Path | None = None,
        nouns_path: str | Path | None = None,
        split: str | None = "train",
    ) -> None:
        reward.check_installed()
        search.check_installed()
        self.products = whole("products", products, least=1, most=catalogue.MAX_PRODUCTS)
        self.catalogue_seed = whole("catalogue_seed", catalogue_seed, least=0, most=2**63 - 1)
        self.options = whole("options", options, least=0, most=catalogue.MAX_OPTIONS)
        self.per_page = whole("per_page", per_page, least=1, most=MAX_PER_PAGE)
        self.show_attributes = flag("show_attributes", show_attributes)
        self.show_choices = flag("show_choices", show_choices)
        self.show_clicked = flag("show_clicked", show_clicked)
        self.binary = flag("binary", binary)
        self.split = one_of("split", split, (*SPLITS, None))
        self._layout = Layout(self.per_page, self.show_attributes)
        buttons = ", ".join(pages.buttons(self._layout))
        self.brief: str = _BRIEF.format(
            buttons="" if self.show_choices else f" Buttons: {buttons}."
        )
        given = {
            **{"path": path, "attributes_path": attributes_path},
            **{"instructions_path": instructions_path, "nouns_path": nouns_path},
        }
        self.shop, self.path = self._open_shop(**given), path
        splits = SPLITS if self.split is None else (self.split,)
        self._goals = np.concatenate([self.shop.splits[name] for name in splits])
        if not len(self._goals):
            raise ValueError(
                f"split {self.split!r} of products={self.products} has no goal: raise products"
            )

    def _open_shop(self, **given: str | Path | None) -> Shop:
        """Return the shop of the given files, or the generated shop."""
        for name, path in given.items():
            file_name(name, path)
        products, attributes, instructions, nouns = given.values()
        if products is not None and attributes is not None:
            found = files.Paths(products, attributes, instructions, nouns)
            return shop_cache.open_shop(found, seed=self.catalogue_seed)
        if any(path is not None for path in given.values()):
            raise ValueError(
                "files are read if both path (items_shuffle*.json) and attributes_path "
                f"(items_ins_v2*.json) are given, got path={products}, "
                f"attributes_path={attributes}"
            )
        return generated_shop(self.products, self.catalogue_seed, self.options)

    def list_problems(self) -> Iterator[tuple[int, str, Visit]]:
        """Yield (row, split, state) of each goal of the files, in the order of their products."""
        if self.path is None:
            return
        split_of = np.empty(len(self.shop.goals), np.int8)
        for number, goals in enumerate(self.shop.splits.values()):
            split_of[goals] = number
        names = tuple(self.shop.splits)
        for goal, split in zip(self.shop.goals, split_of, strict=True):
            yield self.shop.products[goal.place].row, names[split], Visit(goal)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Words of the generated catalogue, its pages, and the expert's reasoning."""
        return (*catalogue.generated_words(), *expert.WORDS)

    def reset(self, seed: int) -> Visit:
        """Return the first page of goal `seed`, an int in [0, 2**63), modulo the split's goals."""
        number = self._goals[problem_seed(seed) % len(self._goals)]
        return Visit(self.shop.goals[int(number)])

    def render(self, state: Visit) -> str:
        """Return the page, with the chosen options and the available actions if configured."""
        lines = [pages.page_text(self.shop, state, self._layout)]
        if self.show_clicked and state.page == pages.ITEM and state.options:
            chosen = ", ".join(value for _, value in state.options)
            lines.insert(0, f"You have clicked {chosen}.")
        choices = self.choices(state)
        if self.show_choices and choices:
            lines.append(f"You must choose from these actions: {', '.join(choices)}.")
        return "\n".join(lines)

    def choices(self, state: Visit) -> tuple[str, ...]:
        """Return the actions of a page, for display; "search[<content>]" stands for any search.

        As in RAGEN, "click[next >]" is not listed if a page of results is empty, although it works.
        """
        if state.page == pages.START:
            return ("search[<content>]",)
        labels = pages.clickables(self.shop, state, self._layout)
        if labels == (pages.BACK, pages.PREVIOUS, pages.NEXT):
            labels = labels[:-1]
        return tuple(f"click[{label}]" for label in labels)

    def step(self, state: Visit, action: str, rng: np.random.Generator | None = None) -> Step:
        """Apply an action of any content. `rng` is unused.

        An action that the page does not have changes nothing and earns nothing. Arguments are
        lower-cased first, so case never matters.

        info: "success" (the published rule gives the purchase 1), "valid" (the page has the
        action) and, for a purchase, "raw_reward", "type", "attributes", "options" and "price".
        """
        kind, argument = _read(action)
        if kind == "search" and state.page == pages.START and argument:
            after = Visit(state.goal, pages.RESULTS, argument[:MAX_QUERY])
            return Step(after, 0.0, False, {"success": False, "valid": True})
        valid = kind == "click" and argument in pages.clickables(self.shop, state, self._layout)
        if not valid:
            return Step(state, 0.0, state.page == pages.BOUGHT, {"success": False, "valid": False})
        if argument == pages.BUY and state.page == pages.ITEM:
            return self._buy(state)
        return Step(self._click(state, argument), 0.0, False, {"success": False, "valid": True})

    def _click(self, state: Visit, label: str) -> Visit:
        """Return the state after clicking a label of the page; buttons precede equal values."""
        on_item = state.page == pages.ITEM
        if label == pages.BACK:
            return Visit(state.goal)
        if label == pages.NEXT and state.page == pages.RESULTS:
            return replace(state, number=state.number + 1)
        if label == pages.PREVIOUS and state.page == pages.RESULTS:
            return replace(state, number=state.number - 1)
        if label == pages.PREVIOUS and on_item:
            return replace(state, page=pages.RESULTS, place=-1, options=())
        if label == pages.PREVIOUS:
            return replace(state, page=pages.ITEM)
        if on_item and label in pages.SUB_PAGES:
            return replace(state, page=label)
        if on_item:
            # If two options share a value, the click selects the last option on the page.
            offered = self.shop.products[state.place].options
            name = [name for name, values in offered if label in values][-1]
            return replace(state, options=tuple({**dict(state.options), name: label}.items()))
        found = pages.results(self.shop, state, self._layout)
        place = next(place for place, product in found.items() if product.asin.lower() == label)
        return replace(state, page=pages.ITEM, place=place, options=())

    def _buy(self, state: Visit) -> Step:
        result = reward.purchase_reward(
            self.shop.products[state.place],
            self.shop.products[state.goal.place],
            state.goal,
            dict(state.options),
        )
        success = result.reward >= 1
        info = {
            **{"success": success, "valid": True, "raw_reward": result.reward},
            **{"type": result.kind, "attributes": result.attributes},
            **{"options": result.options, "price": result.price},
        }
        earned = float(success) if self.binary else result.reward
        return Step(replace(state, page=pages.BOUGHT), earned, True, info)

    def identity(self, state: Visit) -> str:
        """Return the wanted product, attributes and options, whatever the wording."""
        return identity(state.goal)

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of facts in `thought` that a page shows, number of facts stated)."""
        return expert.count_grounded(observation, thought)

    def solve(self, state: Visit) -> tuple[str, ...] | None:
        """Return the way to buy a product whose title fits; None if no search finds one.

        If an option is chosen that the goal does not name, the way leads back through the results,
        since options cannot be deselected.
        """
        return expert.plan(self.shop, state, self._layout)

    def explain(self, state: Visit, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the product that it looks for, and its next click.

        For example "find slim fit hand made shirt", "find slim fit hand made shirt below 40.00
        take b00117 Nova hand made slim fit shirt", "find slim fit hand made shirt below 40.00 so
        next >" and "want red, large have red so large".
        """
        return expert.thought(self.shop, state, self._layout, plan)


def _read(action: str) -> tuple[str, str]:
    """Return (search or click, argument in lower case) of an action; ("", "") for other text.

    Unlike in WebShop's pattern, a label may contain brackets.
    """
    found = _ACTION.match(action)
    return (found[1], found[2].lower()) if found else ("", "")
