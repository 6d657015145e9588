"""Generated data sets: TFDS builders whose examples are in array_record files.

They can be read at random and without TensorFlow. A folder is named after a hash of everything
that determines its examples.
"""

import contextlib
import functools
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen_jax.core.progress import enter_phase
from ragen_jax.storage.atomic_io import with_retries
from ragen_jax.storage.cache import lock_path
from ragen_jax.storage.checksums import CHECKSUMS, damage, write_checksums
from ragen_jax.storage.console import console

if TYPE_CHECKING:  # importing it takes half a second
    import tensorflow_datasets as tfds


def settings_hash(settings: dict[str, Any] | list[dict[str, Any]]) -> str:
    """Return 12 hex digits of the SHA-256 of JSON-like settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def open_or_generate(
    name: str,
    settings: dict[str, Any],
    *,
    features: dict[str, Any],
    generate: Callable[[], Iterable[dict[str, Any]]],
    directory: Path,
) -> "StoredExamples":
    """Open a dataset, generating it on first use; each example is read when it is accessed.

    A dataset with damaged files is reported and generated again.

    Args:
      name: name of the dataset.
      settings: JSON-like; everything that determines the examples.
      features: name -> TFDS feature.
      generate: returns an iterator of the examples; called again if a full disk interrupts it.
      directory: folder of TFDS's files.
    """
    import tensorflow_datasets as tfds  # takes half a second, like importing `tfds_builder`

    from ragen_jax.storage.tfds_builder import Generated

    folder = Path(directory) / f"{name}_{settings_hash(settings)}"
    tfds.disable_progress_bar()  # its bars and notices would disturb the run's output
    make = functools.partial(Generated, generate=generate, features=features, data_dir=str(folder))
    if damage(folder) or not make().is_prepared():
        enter_phase(f"generating {folder.name}")  # or waiting for a process that generates it
        with lock_path(folder):
            if found := damage(folder):  # no other process has generated it meanwhile
                console(f"warning: {found}; generating it again")
                with_retries(functools.partial(shutil.rmtree, folder), folder)
            with_retries(lambda: _prepare(make()), folder)
            if not (folder / CHECKSUMS).exists():
                write_checksums(folder)
    builder = make()
    return StoredExamples(builder.as_data_source(split="examples"))


def _prepare(builder: "tfds.core.DatasetBuilder") -> None:
    """Generate a dataset unless it exists."""
    if not builder.is_prepared():
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()


class StoredExamples:
    """The examples of a dataset in the order of its files, with text as str."""

    def __init__(self, source: Sequence[dict[str, Any]]) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._source[index]
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in example.items()}
