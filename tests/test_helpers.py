"""Helper files of tests: unique names, existing paths, scripts that end in `_script`."""

import collections
import importlib.machinery
import re
import subprocess
import sys
import types

import conftest
import mutation_testing
import pytest
from cli_commands import ROOT

pytestmark = pytest.mark.fast

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
HELPERS = [path for path in FILES if not path.name.startswith(("test_", "conftest"))]
HISTORY = ("benchmarks/NOTES.md", "CHANGELOG.md")  # files that keep old names
PATH = re.compile(r"(?<![\w/.])tests/[\w/]+\.py\b")


def test_no_two_files_share_a_module_name():
    """Pytest puts every test folder on `sys.path`; of two files with one name, the first is
    imported."""
    count = collections.Counter(path.stem for path in FILES)
    assert len(FILES) > 200 and [name for name, n in count.items() if n > 1] == []


def test_no_helper_hides_an_installed_module():
    outside = [x for x in sys.path if x and not x.startswith(str(TESTS)) and x != str(ROOT)]
    find = importlib.machinery.PathFinder.find_spec
    assert find("pytest", outside) is not None
    names = {path.stem for path in HELPERS}
    assert [x for x in names if x in sys.stdlib_module_names or find(x, outside)] == []


def test_mentioned_files_exist():
    """Check mentions of files below tests/ in code and in pages; the measurement log keeps old
    names."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    missing, seen = [], 0
    for name in listed.stdout.split():
        if name.endswith((".py", ".md", ".toml")) and name not in HISTORY:
            for mentioned in PATH.findall((ROOT / name).read_text()):
                seen += 1
                if not (ROOT / mentioned).exists():
                    missing.append((name, mentioned))
    assert seen > 50 and missing == []


def test_files_with_a_main_say_that_they_are_scripts():
    """A helper that tests start as a process ends in `_script`; tools for people are listed
    here."""
    tools = {"mutation_testing", "hostile_servers"}
    runs = {
        path.stem
        for path in HELPERS
        if "reference" not in path.parts
        and re.search(r'__name__ == "__main__"|^\S.*sys\.argv', path.read_text(), re.M)
    }
    scripts = {path.stem for path in HELPERS if path.stem.endswith("_script")}
    assert len(scripts) == 22 and runs - tools == scripts


def test_modules_of_mutation_testing_exist():
    for module, tests in mutation_testing.MODULES.items():
        assert (ROOT / mutation_testing.path(module)).exists(), module
        assert set(tests.split()) <= mutation_testing.TESTS.keys(), module


@pytest.mark.parametrize("worker, count", [(False, 2), (True, None)])
def test_only_the_first_process_starts_workers(worker, count):
    """A worker of `pytest` without arguments reads the same command line as the first process."""
    option = types.SimpleNamespace(markexpr="", keyword="", numprocesses=None, dist="no")
    config = types.SimpleNamespace(option=option, args_source=pytest.Config.ArgsSource.TESTPATHS)
    if worker:
        config.workerinput = {}
    conftest.pytest_cmdline_main(config)
    assert (option.numprocesses, option.markexpr) == (count, conftest.CORE)
