"""A generated encyclopedia: things of four kinds, and a passage about each that names others.

Questions follow the links: "Who is the mayor of the birthplace of Marwyn?" is answered by the
passage about the birthplace, which only the passage about Marwyn names. The same things have
different facts in different worlds, so that only reading reveals them.
"""

import functools
import itertools
from dataclasses import dataclass

from ragen_jax.envs.problems import Draws

TAG = 0x5EA2C401  # tag of the `Draws` of a world

# Kind -> relation -> (kind of its value, sentence). A relation has one value and belongs to one
# kind, and no sentence can be parsed as another relation's.
RELATIONS: dict[str, dict[str, tuple[str, str]]] = {
    "person": {
        "birthplace": ("town", "{x} was born in {y}."),
        "employer": ("company", "{x} works for {y}."),
        "teacher": ("person", "{x} was taught by {y}."),
    },
    "town": {
        "mayor": ("person", "The mayor of {x} is {y}."),
        "region": ("region", "{x} lies in {y}."),
        "emblem": ("animal", "The emblem of {x} is the {y}."),
    },
    "company": {
        "founder": ("person", "{x} was founded by {y}."),
        "seat": ("town", "{x} has its seat in {y}."),
        "product": ("product", "{x} makes {y}."),
    },
    "region": {
        "capital": ("town", "The capital of {x} is {y}."),
        "governor": ("person", "The governor of {x} is {y}."),
        "crop": ("crop", "The main crop of {x} is {y}."),
    },
}
KINDS = tuple(RELATIONS)
KIND_OF = {relation: kind for kind, relations in RELATIONS.items() for relation in relations}

# Values that no passage is about.
VALUES = {
    "animal": ("bear", "crane", "deer", "fox", "heron", "lion", "owl", "salmon", "swan", "wolf"),
    "product": ("bells", "boats", "clocks", "glass", "lamps", "paper", "ropes", "soap", "tiles"),
    "crop": ("barley", "beans", "flax", "hops", "lentils", "oats", "rice", "rye", "wheat"),
}

# A name is one of STARTS plus one of its kind's ENDS: one word, unique to its thing.
STARTS = (
    *("Al", "Bar", "Cor", "Dan", "El", "Far", "Gar", "Hal", "Ir", "Jor", "Kal", "Lin", "Mar"),
    *("Nor", "Or", "Per", "Quin", "Ros", "Sel", "Tor", "Ul", "Var", "Wil", "Zan"),
)
ENDS = {
    "person": ("bert", "dra", "ette", "gund", "kas", "mela", "nell", "ric", "sia", "tin", "wyn"),
    "town": ("bridge", "burg", "dale", "field", "ford", "haven", "mouth", "stead", "vale", "wick"),
    "company": ("corp", "gen", "lab", "line", "mart", "net", "soft", "tek", "tron", "works"),
    "region": ("ania", "avia", "esia", "istan", "land", "mark", "march", "moor", "onia", "shire"),
}
MIN_THINGS = 5  # of each kind
MAX_THINGS = len(STARTS) * min(len(ends) for ends in ENDS.values())
MAX_HOPS = 4


@dataclass(frozen=True, slots=True)
class Link:
    """A fact: the `relation` of thing `x` is `y`."""

    x: str
    relation: str
    y: str

    def sentence(self) -> str:
        """Return the sentence that a passage has for the fact."""
        return RELATIONS[KIND_OF[self.relation]][self.relation][1].format(x=self.x, y=self.y)

    def claim(self) -> str:
        """Return the fact in the form that reasoning states it: "birthplace of Ann is Corford"."""
        article = "the " if self.y in VALUES["animal"] else ""
        return f"{self.relation} of {self.x} is {article}{self.y}"


@dataclass(frozen=True)
class World:
    """An encyclopedia.

    things: kind -> names
    links: thing -> relation -> fact
    passages: a text about each thing, in the order of `things`; as in wiki-18, the first line is
        the title in quotation marks
    """

    things: dict[str, tuple[str, ...]]
    links: dict[str, dict[str, Link]]
    passages: tuple[str, ...]


@functools.lru_cache(maxsize=8)
def name_things(things: int) -> dict[str, tuple[str, ...]]:
    """Return {kind: `things` names}; the names for a smaller number are among them."""
    draws = Draws(0, 0, TAG)  # no world's draws: each world has at least MIN_THINGS things
    orders = {
        kind: draws.shuffled(start + end for start in STARTS for end in ends)
        for kind, ends in ENDS.items()
    }
    return {kind: tuple(order[:things]) for kind, order in orders.items()}


@functools.lru_cache(maxsize=256)
def make_world(number: int, things: int) -> World:
    """Return world `number`, with `things` things of each kind. Pure in both.

    Each relation leads from a thing to another thing, drawn uniformly.
    """
    draws, names = Draws(number, things, TAG), name_things(things)
    links: dict[str, dict[str, Link]] = {}
    for kind, relations in RELATIONS.items():
        for x in names[kind]:
            links[x] = {}
            for relation, (target, _) in relations.items():
                candidates = VALUES.get(target) or tuple(y for y in names[target] if y != x)
                y = candidates[draws.below(len(candidates))]
                links[x][relation] = Link(x, relation, y)
    passages = tuple(
        f'"{x}"\n{" ".join(link.sentence() for link in facts.values())}'
        for x, facts in links.items()
    )
    return World(names, links, passages)


def draw_chain(draws: Draws, world: World, hops: int) -> tuple[Link, ...] | None:
    """Make one attempt at a chain of facts, each about the value of the previous fact.

    None if the chain returns to a thing, or reaches a value without a passage before its end.
    """
    kind = KINDS[draws.below(len(KINDS))]
    x = world.things[kind][draws.below(len(world.things[kind]))]
    chain: list[Link] = []
    for _ in range(hops):
        facts = tuple(world.links.get(x, {}).values())
        if not facts:
            return None
        link = facts[draws.below(len(facts))]
        chain.append(link)
        x = link.y
    names = [chain[0].x, *(link.y for link in chain)]
    return tuple(chain) if len(set(names)) == len(names) else None


def ask(chain: tuple[Link, ...]) -> str:
    """Return a chain's question, such as "Who is the mayor of the birthplace of Marwyn?"."""
    last = chain[-1].relation
    word = "Who" if RELATIONS[KIND_OF[last]][last][0] == "person" else "What"
    relations = " of the ".join(link.relation for link in reversed(chain))
    return f"{word} is the {relations} of {chain[0].x}?"


def identity(chain: tuple[Link, ...]) -> str:
    """Return a question's identity: its facts. They differ between worlds for the same text."""
    return " ".join(link.sentence() for link in chain)


def _phrases(sentence: str) -> list[str]:
    """Return the parts of a sentence around its names."""
    return [part for part in sentence.replace("{x}", "|").replace("{y}", "|").split("|") if part]


def words(things: int) -> tuple[str, ...]:
    """Return texts that the tiny agent's tokenizer keeps whole: from questions and passages."""
    sentences = [sentence for facts in RELATIONS.values() for _, sentence in facts.values()]
    names = [name for names in (*name_things(things).values(), *VALUES.values()) for name in names]
    parts = ["Who is the ", "What is the ", " of the ", " of ", "?", *KIND_OF]
    return tuple(dict.fromkeys([*parts, *itertools.chain(*map(_phrases, sentences)), *names]))
