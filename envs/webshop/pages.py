"""Pages as text, and the labels that can be clicked on them.

The texts are those of WebShop's text mode: the visible parts of a page's HTML, joined by " [SEP] "
(web_agent_site/templates; envs/web_agent_text_env.py: convert_html_to_text).
"""

from dataclasses import dataclass

from ragen_jax.envs.webshop.catalogue import Product
from ragen_jax.envs.webshop.goals import Goal
from ragen_jax.envs.webshop.shop import Shop

SEPARATOR = " [SEP] "
_SPACES = " \n\t\f\r"  # ASCII white space as HTML parsers define it

START, RESULTS, ITEM, BOUGHT = "start", "results", "item", "bought"  # pages
BACK, PREVIOUS, NEXT, BUY = "back to search", "< prev", "next >", "buy now"  # labels
DESCRIPTION, FEATURES, REVIEWS, ATTRIBUTES = "description", "features", "reviews", "attributes"
SUB_PAGES = (DESCRIPTION, FEATURES, REVIEWS, ATTRIBUTES)  # a page and its label have the same name

LABEL_TEXTS = {BACK: "Back to Search", PREVIOUS: "< Prev", NEXT: "Next >", BUY: "Buy Now"}
LABEL_TEXTS |= {name: name.title() for name in SUB_PAGES}


@dataclass(frozen=True, slots=True)
class Visit:
    """A state: a buyer's goal and the current page.

    page: START, RESULTS, ITEM, one of SUB_PAGES or BOUGHT
    query, number: the latest search, and the page of its results, from 1
    place, options: index of the product shown, and its chosen options: (name, value) in the order
        of the first click on a name
    """

    goal: Goal
    page: str = START
    query: str = ""
    number: int = 1
    place: int = -1
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of pages.

    per_page: products per page of results
    attributes: whether a product's page has a button "Attributes"
    """

    per_page: int = 10
    attributes: bool = False


def results(shop: Shop, visit: Visit, layout: Layout) -> dict[int, Product]:
    """Return {index: product} on a visit's page of results; empty after the last page."""
    first = (visit.number - 1) * layout.per_page
    found = shop.find(visit.query)[first : first + layout.per_page].tolist()
    return {place: shop.products[place] for place in found}


def page_text(shop: Shop, visit: Visit, layout: Layout) -> str:
    """Return the text of the current page."""
    instruction = ["Instruction:", visit.goal.instruction]
    match visit.page:
        case "start":
            parts = ["WebShop", *instruction, "Search"]
        case "results":
            total = len(shop.find(visit.query))
            parts = [
                *instruction,
                LABEL_TEXTS[BACK],
                f"Page {visit.number} (Total results: {total})",
            ]
            parts += [LABEL_TEXTS[PREVIOUS]] * (visit.number > 1) + [LABEL_TEXTS[NEXT]]
            for product in results(shop, visit, layout).values():
                parts += [product.asin, product.title, product.tag]
        case "item":
            parts = [*instruction, LABEL_TEXTS[BACK], LABEL_TEXTS[PREVIOUS]]
            parts += _item(shop.products[visit.place], layout)
        case "bought":
            parts = ["Thank you for shopping with us!"]
        case sub_page:
            parts = [*instruction, LABEL_TEXTS[BACK], LABEL_TEXTS[PREVIOUS]]
            parts += _sub_page(shop.products[visit.place], sub_page)
    return SEPARATOR.join(part.strip() for part in parts if _is_shown(part))


def _is_shown(text: str) -> bool:
    """Whether an HTML parser makes a text node of it that the text mode keeps.

    An empty text makes no node, and white space with a line break is left out; other white space
    appears as an empty text.
    """
    return bool(text) and not (not text.strip(_SPACES) and "\n" in text)


def _item(product: Product, layout: Layout) -> list[str]:
    options = [text for name, values in product.options for text in (name, *values)]
    texts = [product.title, f"Price: {product.tag}", "Rating: N.A."]
    return [*options, *texts, *(LABEL_TEXTS[name] for name in _sub_pages(layout)), LABEL_TEXTS[BUY]]


def _sub_page(product: Product, name: str) -> list[str]:
    match name:
        case "description":
            return [product.description]
        case "features":  # an HTML list, with a space before each item
            return [f" {bullet}" for bullet in product.bullets]
        case "attributes":
            attributes = [f" {attribute}" for attribute in product.attributes]
            return [*attributes, product.category, product.query, product.product_category]
    return []  # no product has reviews


def _sub_pages(layout: Layout) -> tuple[str, ...]:
    return SUB_PAGES if layout.attributes else SUB_PAGES[:-1]


def buttons(layout: Layout) -> tuple[str, ...]:
    """Return the labels of all buttons that pages may have."""
    return (BACK, PREVIOUS, NEXT, *_sub_pages(layout), BUY)


def clickables(shop: Shop, visit: Visit, layout: Layout) -> tuple[str, ...]:
    """Return the labels that can be clicked: buttons, then products or options, each once.

    In lower case, as in WebShop's list of available actions.
    """
    match visit.page:
        case "start" | "bought":  # a click on the search button is refused
            return ()
        case "results":
            buttons = [BACK, *[PREVIOUS] * (visit.number > 1), NEXT]
            links = [product.asin.lower() for product in results(shop, visit, layout).values()]
        case "item":
            buttons = [BACK, PREVIOUS, *_sub_pages(layout), BUY]
            links = [value for _, values in shop.products[visit.place].options for value in values]
        case _:
            buttons, links = [BACK, PREVIOUS], []
    return tuple(dict.fromkeys([*buttons, *links]))
