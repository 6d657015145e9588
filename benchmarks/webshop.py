"""WebShop on files of any size: loading and indexing, memory, pages and searches.

    python -m benchmarks.webshop write FOLDER [--products=1000000]
    python -m benchmarks.webshop bm25s FOLDER
    python -m benchmarks.webshop tantivy FOLDER

`write` makes files in the data set's format. `bm25s` measures the environment: reading and indexing
the first time, opening later. `tantivy` indexes the same texts with the same words (pip install
tantivy), and prints the fraction of the 50 products found that are the same. Each command prints
its peak resident memory, including pages of mapped files. Pages and searches are measured in CPU
time, since other programs share the machine. NOTES.md has the figures.
"""

import argparse
import json
import os
import random
import resource
import statistics
import time
from pathlib import Path

from ragen_jax.envs.webshop import search
from ragen_jax.envs.webshop.catalogue import generated_products
from ragen_jax.envs.webshop.env import WebShop

QUERIES = 100
RARE_WORDS = 5  # rare words added to a product's text, as in real catalogues
VOCABULARY = 200_000


def describe(product, draws):
    """Return a product's description with rare words, some much rarer than others."""
    ranks = (int(VOCABULARY * draws.random() ** 3) for _ in range(RARE_WORDS))
    return f"{product.description} {' '.join(f'w{rank:x}' for rank in ranks)}"


def write(folder, products):
    """Write the two files of a generated catalogue."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(0)
    start = time.perf_counter()
    with (
        (folder / "items_shuffle.json").open("w") as items,
        (folder / "items_ins_v2.json").open("w") as attributes,
    ):
        items.write("[")
        attributes.write("{")
        for row, product in enumerate(generated_products(products, seed=0, options=2)):
            comma = ",\n" * (row > 0)
            options = {
                name: [{"value": value, "image": None} for value in values]
                for name, values in product.options
            }
            item = {
                "asin": product.asin,
                "name": product.title,
                "full_description": describe(product, draws),
                "small_description": product.bullets,
                "pricing": product.tag,
                "images": [""],
                "customization_options": options,
                "category": product.category,
                "query": product.query,
                "product_category": product.product_category,
            }
            (wish,) = product.wishes
            wish_fields = {
                "attributes": product.attributes,
                "instruction": wish.text,
                "instruction_attributes": wish.attributes,
            }
            items.write(comma + json.dumps(item))
            attributes.write(f"{comma}{json.dumps(product.asin)}: {json.dumps(wish_fields)}")
        items.write("]")
        attributes.write("}")
    sizes = [f"{path.name} {path.stat().st_size / 1e6:.0f} MB" for path in folder.glob("*.json")]
    print(f"{products} products, {', '.join(sizes)}: {time.perf_counter() - start:.0f} s")


def bm25s(folder):
    """Measure the environment on these files."""
    start, cpu = time.perf_counter(), time.process_time()
    env = WebShop(path=folder / "items_shuffle.json", attributes_path=folder / "items_ins_v2.json")
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{len(env.shop.products)} products, {len(env.shop.goals)} goals, ready after")
    print(f"  {seconds:.1f} s, {cpu:.1f} s of CPU time; {format_peak()}")
    page_times = []
    for seed in range(QUERIES):
        state = env.reset(seed)
        text = " ".join((*state.goal.attributes, env.shop.products[state.goal.place].query))
        results = env.step(state, f"search[{text}]").state
        env.shop.find(results.query)  # cached, so that only the page is timed
        page_times.append(time_call(lambda results=results: env.render(results))[0])
        click = env.choices(results)[-1]
        item = env.step(results, click).state
        page_times.append(time_call(lambda item=item: env.render(item))[0])
        page_times.append(time_call(lambda item=item: env.step(item, "click[buy now]"))[0])
    print(
        f"  page or purchase: {format_times(page_times[3:])}"
    )  # the first purchase imports a package
    found = [time_call(lambda text=text: env.shop.index.search(text)) for text in queries(env)]
    print(f"  search: {format_times([seconds for seconds, _ in found])}; {format_peak()}")
    (folder / "found.json").write_text(
        json.dumps([[env.shop.products[p].asin for p in places.tolist()] for _, places in found])
    )


def queries(env):
    """Yield queries: attributes with a product's query, titles, whole texts, and queries alone."""
    for seed in range(QUERIES):
        product = env.shop.products[env.reset(seed).goal.place]
        texts = [" ".join((*product.attributes[:2], product.query)), product.title]
        yield [*texts, search.indexed_text(product), product.query][seed % 4]


def tantivy(folder):
    """Measure tantivy on the same texts."""
    import tantivy as engine

    env = WebShop(path=folder / "items_shuffle.json", attributes_path=folder / "items_ins_v2.json")
    builder = engine.SchemaBuilder()
    builder.add_text_field("text", tokenizer_name="whitespace", index_option="freq")
    builder.add_text_field("asin", stored=True, tokenizer_name="raw")
    path = folder / "tantivy"
    path.mkdir(exist_ok=True)
    start, cpu = time.perf_counter(), time.process_time()
    index = engine.Index(builder.build(), path=str(path))
    writer = index.writer(heap_size=256_000_000, num_threads=1)
    for product in env.shop.products:
        text = " ".join(search.tokens_of(search.indexed_text(product)))
        writer.add_document(engine.Document(text=text, asin=product.asin))
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"indexed after {seconds:.1f} s, {cpu:.1f} s of CPU time; {format_peak()}")
    searcher = index.searcher()

    def found(text):
        query = index.parse_query(" ".join(search.tokens_of(text)), ["text"])
        hits = searcher.search(query, search.MAX_RESULTS).hits
        return [searcher.doc(address)["asin"][0] for _, address in hits]

    timings, fractions = [], []
    for text, other in zip(
        queries(env), json.loads((folder / "found.json").read_text()), strict=True
    ):
        seconds, asins = time_call(lambda text=text: found(text))
        timings.append(seconds)
        fractions.append(len(set(asins) & set(other)) / len(other))
    print(f"  search: {format_times(timings)}; {format_peak()}")
    print(
        f"  fraction of bm25s's {search.MAX_RESULTS} products found: "
        f"{statistics.mean(fractions):.2f}"
    )


def time_call(function):
    """Call a function; return (seconds of CPU time, result)."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def format_times(seconds):
    """Return the median and the slowest time as text."""
    ordered = sorted(seconds)
    return f"median {1e3 * statistics.median(ordered):.2f} ms, slowest {1e3 * ordered[-1]:.2f} ms"


def format_peak():
    """Return the process's peak resident memory so far as text."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"at most {kib / 2**20:.2f} GiB of memory"


def main():
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.webshop",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=("write", "bm25s", "tantivy"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--products", type=int, default=1_000_000)
    options = parser.parse_args()
    if options.case == "write":
        write(options.folder, options.products)
        return
    # The cache of the files is next to them.
    os.environ["XDG_CACHE_HOME"] = str(options.folder / "cache")
    {"bm25s": bm25s, "tantivy": tantivy}[options.case](options.folder)


if __name__ == "__main__":
    main()
