"""Change one line of a file at a time and check whether its tests fail.

    python tests/mutation_testing.py [MODULE ...] [--count=24] [--seed=0] [--out=mutations.jsonl]
                              [--jobs=1] [--list]

For each module of MODULES, a sample of its possible mutations is applied, one at a time, to a copy
of the tree; the module's tests in MODULES run until the first failure. A mutation that no test
detects is a survivor: read it, and add a test or explain why it changes nothing. Before a module's
first mutation its tests must pass without a mutation. Finished mutations are not run again with the
same --out. All runs share their compiled programs and the tests' agent, whose training no mutation
affects.
"""

import argparse
import ast
import copy
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 4  # timeout as a multiple of the unmutated tests' time; a longer run counts as detected
HANGS_S = 240  # timeout of a single test in seconds; the mutation then counts as detected
UNCHANGED = "nothing"

# module -> its tests; the tests that detect the most mutations in the least time come first
MODULES = {
    "update/learner": "fields_learn learner tasks train",
    "train": "train tasks fields_watch fields_run",
    "algorithm/algorithms": "algorithms fields_learn learner",
    "rollout/collect": "collect randomness fields_run train",
    "rollout/pool": "pool randomness fields_run train",
    "run/tasks": "tasks randomness train",
    "run/diagnose": "fields_run train tasks",
    "diagnostics/scopes": "scopes flow",
    "update/optimize": "optimize policy critic fields_learn",
    "update/passes": "passes buckets",
    "update/policy": "policy gradients fields_learn",
    "update/critic": "critic fields_learn train",
    "rollout/play": "play randomness",
    "diagnostics/regimes": "regimes fields_watch",
    "config/build_environment": "build config fields_start tasks",
    "config/build_model": "build config fields_start",
    "config/build_learner": "build config fields_learn learner tasks",
    "config/per_task": "config fields_learn learner tasks",
    "run/workdir": "config train commands",
}

TESTS = {  # test name -> file
    path.stem.removeprefix("test_"): str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
}

SWAPS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "max",
    "mean": "sum",
    "minimum": "maximum",
    "maximum": "minimum",
    "argmax": "argmin",
    "ones": "zeros",
    "zeros": "ones",
}


def mutations(source):
    """Yield (line, description, new source) of every mutation of a file, in order."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    types = {id(node) for annotation in _annotations(nodes) for node in ast.walk(annotation)}
    arrays = sorted({n.id for n in nodes if isinstance(n, ast.Name) and "_" in n.id})
    for index, node in enumerate(nodes):
        if id(node) in types:
            continue
        for what, change in (*_changes(node), *_other_arrays(node, arrays)):
            other = copy.deepcopy(tree)
            target = list(ast.walk(other))[index]
            before = ast.unparse(target)
            try:
                change(target)
            except _Impossible:
                continue
            new = ast.unparse(ast.fix_missing_locations(other))
            line = getattr(node, "lineno", 0)
            yield line, f"{what}: {_short(before)} -> {_short(ast.unparse(target))}", new


def _annotations(nodes):
    """Yield the type annotations of arguments, fields and functions."""
    for node in nodes:
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                yield getattr(node, name)


class _Impossible(Exception):
    pass


def _short(text):
    line = " ".join(text.split())
    return line if len(line) < 90 else line[:87] + "..."


def _changes(node):
    """Return (name, function that changes the node) for each applicable mutation."""
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and _sensible(node):
        yield "operator", lambda n: setattr(n, "op", SWAPS[type(n.op)]())
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield "comparison", lambda n: n.ops.__setitem__(0, SWAPS[type(n.ops[0])]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield "sign", lambda n: n.__dict__.update(op=ast.UAdd(), operand=n.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        yield "constant", _constant
    if isinstance(node, (ast.If, ast.IfExp)):
        negated = lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))  # noqa: E731
        yield "condition", negated
    if isinstance(node, ast.Call):
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", None))
        if name in NAMES:
            yield "function", _function
        keywords = [k for k in node.keywords if k.arg]
        if len(keywords) >= 2:
            yield "keywords swapped", _swap_keywords
        if len(node.args) >= 2 and all(isinstance(a, ast.Name) for a in node.args[:2]):
            first, second = (_axes(a.id) for a in node.args[:2])
            if first and first == second:  # others would fail at once
                yield (
                    "arguments swapped",
                    lambda n: n.args.__setitem__(slice(0, 2), [n.args[1], n.args[0]]),
                )
    if isinstance(node, ast.FunctionDef):
        for i, statement in enumerate(node.body):
            call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if call or isinstance(statement, ast.AugAssign):
                yield "statement removed", lambda n, i=i: n.body.__setitem__(i, ast.Pass())


def _sensible(node):
    """Return whether the swapped operator could run: its operands are neither strings nor dicts."""
    sides = [getattr(node, name) for name in ("left", "right", "value") if hasattr(node, name)]
    texts = any(isinstance(side, (ast.JoinedStr, ast.Dict, ast.DictComp)) for side in sides)
    texts |= any(isinstance(s, ast.Constant) and isinstance(s.value, str) for s in sides)
    joins = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr)
    return type(node.op) in SWAPS and not texts and not joins


def _axes(name):
    """Return the axes in a name, such as "BT" for logp_BT, or "" for a name without axes."""
    end = name.rsplit("_", 1)[-1]
    return end if "_" in name and end.isupper() else ""


def _other_arrays(node, arrays):
    """Return arguments replaced by another array with the same axes: length_GK for entropy_GK."""
    keywords = node.keywords if isinstance(node, ast.Call) else ()
    for i, keyword in enumerate(keywords):
        name = getattr(keyword.value, "id", "")
        like = [x for x in arrays if _axes(name) and _axes(x) == _axes(name) and x != name]
        if like:
            yield (
                "another array",
                lambda n, i=i, x=like[0]: setattr(n.keywords[i], "value", ast.Name(x)),
            )


def _constant(node):
    value = node.value
    node.value = not value if isinstance(value, bool) else value + 1


def _function(node):
    function = node.func
    field = "attr" if isinstance(function, ast.Attribute) else "id"
    setattr(function, field, NAMES[getattr(function, field)])


def _swap_keywords(node):
    first, second = [k for k in node.keywords if k.arg][:2]
    if ast.dump(first.value) == ast.dump(second.value):
        raise _Impossible
    first.value, second.value = second.value, first.value


def path(module):
    """Return the path of a module of MODULES, relative to the tree."""
    return f"ragen_jax/{module}.py"


def sample(module, count, seed):
    """Return `count` of a module's mutations; the same arguments give the same sample."""
    source = (ROOT / path(module)).read_text()
    found = list(mutations(source))
    random.Random(f"{module} {seed}").shuffle(found)
    return found[:count]


def try_one(mutation, cache, limit_s):
    """Run a module's tests on a copy of the tree with the mutation; return its line for --out."""
    module, line, what, new = mutation
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, tree, ignore=ignore)
        (tree / path(module)).write_text(new)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "AGENT_OF_TESTS": str(cache),
        }
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
        options += ["-m", "not slow"]
        options += ["-o", f"faulthandler_timeout={HANGS_S}", "-o", "faulthandler_exit_on_timeout=1"]
        tests = [TESTS[name] for name in MODULES[module].split()]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
            seen = done.returncode != 0
            lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
            by = lines[0] if lines else "".join(done.stdout.strip().splitlines()[-1:])
        except subprocess.TimeoutExpired:
            seen, by = True, f"still running after {limit_s} s"
    seconds = round(time.perf_counter() - start)
    return dict(module=module, line=line, what=what, seen=seen, by=by, seconds=seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="of MODULES; default: all")
    parser.add_argument("--count", type=int, default=24, help="mutations of a module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--out", default="mutations.jsonl")
    parser.add_argument("--list", action="store_true", help="only say what would be done")
    options = parser.parse_args()
    plan = [
        (module, *mutation)
        for module in options.modules or MODULES
        for mutation in sample(module, options.count, options.seed)
    ]
    out = Path(options.out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(one["module"], one["line"], one["what"]) for one in done}
    plan = [one for one in plan if one[:3] not in known]
    if options.list:
        for module, line, what, _ in plan:
            print(f"{path(module)}:{line}  {what}")
        return
    cache = Path(tempfile.gettempdir()) / "ragen_jax_mutations"
    cache.mkdir(exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool, out.open("a") as file:

        def note(found):
            file.write(json.dumps(found) + "\n")
            file.flush()
            done.append(found)
            if found["what"] != UNCHANGED:
                mark = "seen" if found["seen"] else "SURVIVES"
                print(f"{mark:8} {found['module']}:{found['line']}  {found['what']}", flush=True)

        for module in dict.fromkeys(one[0] for one in plan):
            if (module, 0, UNCHANGED) not in known:
                unchanged = module, 0, UNCHANGED, (ROOT / path(module)).read_text()
                found = try_one(unchanged, cache, limit_s=None)
                if found["seen"]:
                    sys.exit(f"{module}: its tests fail without a mutation: {found['by']}")
                note(found)
            (took_s,) = (
                one["seconds"]
                for one in done
                if (one["module"], one["what"]) == (module, UNCHANGED)
            )
            tries = [one for one in plan if one[0] == module]
            one_try = functools.partial(try_one, cache=cache, limit_s=LIMIT * took_s + 60)
            for found in pool.map(one_try, tries):
                note(found)
    tried = [one for one in done if one["what"] != UNCHANGED]
    print(f"{sum(one['seen'] for one in tried)} of {len(tried)} mutations seen")


if __name__ == "__main__":
    main()
