"""The generated encyclopedia: links, names, questions."""

import hashlib
import itertools
import re

import pytest

from ragen_jax.envs.problems import Draws
from ragen_jax.envs.search_qa.world import (
    ENDS,
    KIND_OF,
    KINDS,
    MAX_THINGS,
    RELATIONS,
    STARTS,
    VALUES,
    Link,
    ask,
    draw_chain,
    identity,
    make_world,
    name_things,
    words,
)

pytestmark = pytest.mark.fast

# sha256 of the passages of worlds 0..9 of 20 things. A different digest means that every problem
# has changed.
WORLDS_0_TO_9 = "30ab340d7cb7b569bc4613e96852b839103fe7a0249d36f83e172e3a066f0654"

CHAIN = (Link("Marwyn", "birthplace", "Corford"), Link("Corford", "mayor", "Zannell"))


def test_worlds_are_pinned():
    texts = [text for number in range(10) for text in make_world(number, 20).passages]
    assert hashlib.sha256("\n\n".join(texts).encode()).hexdigest() == WORLDS_0_TO_9


def test_names_are_of_one_thing():
    names = [start + end for start in STARTS for ends in ENDS.values() for end in ends]
    names += [value for values in VALUES.values() for value in values]
    assert len({name.lower() for name in names}) == len(names)
    assert all(name.isascii() and name.isalpha() for name in names)
    assert len(KIND_OF) == sum(map(len, RELATIONS.values()))
    assert not {name.lower() for name in names} & set(KIND_OF)


@pytest.mark.parametrize("things", [5, 20, MAX_THINGS])
def test_every_thing_has_every_fact_of_its_kind(things):
    world = make_world(3, things)
    kinds = {name: kind for kind, names in world.things.items() for name in names}
    assert len(kinds) == len(world.passages) == things * len(KINDS)
    for (name, facts), passage in zip(world.links.items(), world.passages, strict=True):
        title, text = passage.split("\n")
        assert title == f'"{name}"' and set(facts) == set(RELATIONS[kinds[name]])
        for relation, link in facts.items():
            assert (link.x, link.relation) == (name, relation) and link.y != name
            target = RELATIONS[kinds[name]][relation][0]
            assert link.y in (VALUES.get(target) or world.things[target])
            assert link.sentence() in text
        assert len(re.findall(r"\.(?: |$)", text)) == len(facts)


def test_worlds_are_pure_and_differ():
    make_world.cache_clear()
    one = make_world(1, 20)
    make_world.cache_clear()
    assert make_world(1, 20) == one != make_world(2, 20)
    worlds = [make_world(number, MAX_THINGS) for number in (0, 1)]
    assert worlds[0].things == worlds[1].things == name_things(MAX_THINGS)
    assert len(set(worlds[0].passages) & set(worlds[1].passages)) < 5  # but the facts differ
    few = name_things(5)
    assert all(few[kind] == names[:5] for kind, names in name_things(240).items())


def test_questions():
    assert ask(CHAIN) == "Who is the mayor of the birthplace of Marwyn?"
    assert ask(CHAIN[1:]) == "Who is the mayor of Corford?"
    assert ask((*CHAIN[:1], Link("Corford", "emblem", "owl"))) == (
        "What is the emblem of the birthplace of Marwyn?"
    )
    assert identity(CHAIN) == "Marwyn was born in Corford. The mayor of Corford is Zannell."


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_chains_are_linked_and_their_questions_have_one_answer(hops):
    world = make_world(0, 20)
    found, asked = 0, {}
    for seed in range(600):
        chain = draw_chain(Draws(seed, 0, 1), world, hops)
        if chain is None:
            continue
        found += 1
        assert len(chain) == hops
        assert all(a.y == b.x for a, b in itertools.pairwise(chain))
        met = [chain[0].x, *(link.y for link in chain)]
        assert len(set(met)) == hops + 1
        assert all(world.links[link.x][link.relation] == link for link in chain)
        assert asked.setdefault(ask(chain), chain) == chain
        # Follow the chain from the words of the question alone, from the end.
        words = re.fullmatch(r"(?:Who|What) is the (.*) of (\w+)\?", ask(chain))
        thing = words[2]
        for relation in reversed(words[1].split(" of the ")):
            thing = world.links[thing][relation].y
        assert thing == chain[-1].y
        if hops > 1:  # only the passage about that thing states the last step
            first = world.passages[list(world.links).index(chain[0].x)]
            assert chain[-1].sentence() not in first
    assert found > 80
    assert {chain[-1].relation for chain in asked.values()} == set(KIND_OF)


def test_the_tokenizer_keeps_what_is_written_whole():
    """Apart from the listed words, passages and questions have only punctuation and spaces."""
    world = make_world(0, 30)
    pattern = "|".join(re.escape(word) for word in sorted(words(30), key=len, reverse=True))
    texts = [*world.passages]
    assert len(set(words(30))) == len(words(30))
    texts += [ask(c) for s in range(50) if (c := draw_chain(Draws(s, 0, 1), world, 2))]
    for text in texts:
        left = re.sub(pattern, "", text)
        assert not re.search(r"\w", left), (text, left)
