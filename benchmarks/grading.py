"""DeepCoder's grader: programs in parallel on one core and on all, and the cost of a sandbox.

    python -m benchmarks.grading [--programs=64] [--seconds=0.2] [--repeats=3]

A program works for `seconds` of processor time and passes its one test. Both sides are measured in
turn, and medians are printed. NOTES.md has the figures.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from ragen_jax.envs.deepcoder import grade, sandbox

TEST = {"input": "", "output": "42", "testtype": "stdin_stdout"}
WORK = "import time\nwhile time.process_time() < {seconds}: pass\nprint(42)"
STARTS = 20  # number of timed starts of each sandbox


def side_by_side(programs, seconds, cores):
    """Return the seconds of grading `programs` programs, `cores` of them at a time."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[:cores])
    sandbox._test_slots.cache_clear()  # the number of cores is cached
    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(programs) as pool:
            code = WORK.format(seconds=seconds)
            grades = list(pool.map(lambda _: grade(code, [TEST], time_limit_s=60), range(programs)))
        took = time.perf_counter() - start
    finally:
        os.sched_setaffinity(0, all_cores)
        sandbox._test_slots.cache_clear()
    assert all(found.passed == 1 for found in grades), "a correct program did not pass"
    return took


def time_start(name):
    """Return the seconds of a test of an almost empty program; name None: of a plain process."""
    start = time.perf_counter()
    if name is None:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", "print(42)"], capture_output=True, check=True
        )
    else:
        assert grade("print(42)", [TEST], sandbox=name).passed == 1
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grading")
    parser.add_argument("--programs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    names = [None, *(name for name in sandbox.SANDBOXES if not sandbox._try(name))]
    starts = {name: [] for name in names}
    for _ in range(STARTS):
        for name in names:
            starts[name].append(time_start(name))
    for name, times in starts.items():
        print(f"{name or 'a plain process'}: {1000 * statistics.median(times):.0f} ms per test")
    cores = sorted({1, len(os.sched_getaffinity(0))})
    took = {count: [] for count in cores}
    for _ in range(options.repeats):
        for count in cores:
            took[count].append(side_by_side(options.programs, options.seconds, count))
    one = statistics.median(took[1])
    for count, times in took.items():
        middle = statistics.median(times)
        speed = f"{options.programs / middle:.1f} programs/s, x {one / middle:.2f}"
        print(f"{options.programs} programs on {count} core(s): {middle:.1f} s, {speed}")


if __name__ == "__main__":
    main()
