"""Every task of reasoning-gym: speed and length of its problems, and whether it is accepted.

    python -m benchmarks.gym_tasks > docs/reasoning_gym.md

Seconds are CPU time of one core: medians over ITEMS items, or over fewer if SECONDS have passed.
"""

import copy
import statistics
import time

from benchmarks.pages import read_introduction
from ragen_jax.envs.reasoning_gym_tasks import package

ITEMS = 15
SECONDS = 6.0  # maximum CPU time of a task
FIRST = 1000  # index of the first item
# Refused tasks: their largest possible size.
SIZES = {"word_ladder": 20_000, "list_functions": 10_000}


def measure(factory, task):
    """Measure a task and return its figures, a dict."""
    start = time.process_time()
    dataset = factory.create_dataset(task, seed=0, size=SIZES.get(task, package.items(task)))
    prepare_end = time.process_time()
    seconds, entries = [], []
    while len(entries) < ITEMS and time.process_time() - start < SECONDS:
        before = time.process_time()
        entries.append(dataset[FIRST + len(entries)])
        seconds.append(time.process_time() - before)
    entries_with_answer = [entry for entry in entries if entry["answer"] is not None]
    right = sum(
        dataset.score_answer(entry["answer"].strip(), copy.deepcopy(entry)) >= 1
        for entry in entries_with_answer
    )
    levels = 0
    if factory.has_curriculum(task):
        attributes = factory.create_curriculum(task).attributes.values()
        levels = max(len(attribute.levels) for attribute in attributes)
    return {
        "start": prepare_end - start,
        "rate": 1 / max(statistics.median(seconds), 1e-6),
        "slowest": max(seconds),
        "characters": int(statistics.median(len(entry["question"]) for entry in entries)),
        "oracle": f"{right} of {len(entries)}" if entries_with_answer else "none",
        "levels": levels or "none",
    }


def row(factory, task):
    """Return the line of a task in the table."""
    state = f"refused: {package.REFUSED[task]}" if task in package.REFUSED else "accepted"
    if task == "composite":
        return f"| `{task}` | | | | | | | {state} |"
    found = measure(factory, task)
    rate = f"{float(format(found['rate'], '.2g')):,.10g}"
    return (
        f"| `{task}` | {rate} | {found['slowest']:.2g} | {found['start']:.1f} | "
        f"{found['characters']:,} | {found['oracle']} | {found['levels']} | {state} |"
    )


def main():
    start = time.process_time()
    factory = package.load()
    tasks = sorted(factory.DATASETS)
    accepted = len(set(tasks) - set(package.REFUSED))
    rows = [row(factory, task) for task in tasks]
    print(read_introduction("gym_tasks.md"))
    print(
        f"{accepted} of {len(tasks)} tasks are accepted. Written by `python -m benchmarks.gym_tasks"
        f" > docs/reasoning_gym.md` in {time.process_time() - start:.0f} s of CPU time.\n"
    )
    print(
        "| task | items a second | slowest, s | start, s | question, characters | oracle right | "
        "levels | state |"
    )
    print("| --- | ---: | ---: | ---: | ---: | --- | --- | --- |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
