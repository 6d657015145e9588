"""The TFDS builder of generated datasets. Importing this module imports TFDS."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from ragen_jax.storage.atomic_io import reading


def _is_not_of_unfinished(record: logging.LogRecord) -> bool:
    """Filter out TFDS's warning about the folder of a data set that is not generated yet."""
    return not str(record.msg).startswith("Variant folder %s has no ")


logging.getLogger("absl").addFilter(_is_not_of_unfinished)


class Generated(tfds.core.GeneratorBasedBuilder):
    """The examples of a generator, in its order.

    The feature `index` remains from datasets that TFDS shuffled.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(
        self,
        *,
        generate: Callable[[], Iterable[dict[str, Any]]],
        features: dict[str, Any],
        data_dir: str,
    ) -> None:
        self._generate = generate
        self._features = {"index": np.int64, **features}
        super().__init__(data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(self._features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(
        self, download_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"examples": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with reading():  # an error of the source is not an error of the disk that is written
            for index, example in enumerate(self._generate()):
                yield index, {"index": index, **example}
