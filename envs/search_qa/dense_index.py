"""A folder with the texts of a corpus and the settings of its vectors; loaded at the first search.

The file `SETTINGS` says where the vectors and the encoder are, and the vectors' dtype on the
devices.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa import dense
from ragen_jax.envs.search_qa.dense import DenseRetriever
from ragen_jax.envs.search_qa.e5 import E5, QUERY, read_shape
from ragen_jax.envs.search_qa.passages import Passages
from ragen_jax.envs.search_qa.retrieve import Document
from ragen_jax.envs.search_qa.vectors import open_vectors
from ragen_jax.envs.types import Resident
from ragen_jax.model import hf
from ragen_jax.storage.atomic_io import atomic_write

SETTINGS = "dense.json"
VECTORS = "vectors.npy"


@dataclass(frozen=True)
class Settings:
    """The settings of a dense index.

    vectors: a separate file of vectors; "": `VECTORS` in the folder
    encoder: directory or hub id of the model that made the vectors and encodes queries
    dtype: dtype of the vectors on the devices, one of `dense.DTYPES`
    """

    vectors: str
    encoder: str
    dtype: str

    def write(self, folder: Path) -> None:
        atomic_write(folder / SETTINGS, json.dumps(asdict(self), indent=2) + "\n")


def read_settings(folder: Path) -> Settings:
    """Return the `Settings` of an index.

    Raises:
      ValueError: the folder holds no dense index, or its settings are malformed.
    """
    file = folder / SETTINGS
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{folder} holds no dense index ({error}); make one with python -m "
            "ragen_jax.retriever build --retriever=dense"
        ) from None
    names = Settings.__dataclass_fields__
    if not isinstance(fields, dict) or set(fields) != set(names):
        raise ValueError(f"{file} must hold {', '.join(names)}, got {fields!r:.80}")
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{file}: {name} must be a text, got {value!r:.80}")
    if fields["dtype"] not in dense.DTYPES:
        accepted = ", ".join(dense.DTYPES)
        raise ValueError(f"{file}: dtype is {fields['dtype']!r}; accepted: {accepted}")
    return Settings(**fields)


class DenseIndex:
    """Dense retrieval over an index, with its vectors over all devices; see `dense.Dense`.

    The constructor reads only the files' headers: that they exist and fit each other. The vectors,
    gigabytes, are read at the first search or by `load`.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raise ValueError if a file is missing, malformed, or does not fit the others.

        Also in runs of several processes, whose queries differ and come at different times.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"{folder} is a dense index, which one process searches, and this run has "
                f"{jax.process_count()}: serve it (python -m ragen_jax.retriever serve)"
            )
        folder = Path(folder).expanduser()
        self._settings = settings = read_settings(folder)
        self._texts = Passages(folder)
        self._vectors = open_vectors(settings.vectors or folder / VECTORS)
        encoder = read_shape(hf.resolve(settings.encoder)).hidden_size
        dense.check_fit(self._vectors, encoder, self._texts)
        self._lock, self._dense = threading.Lock(), None

    def __len__(self) -> int:
        return len(self._texts)

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """As `dense.Dense.search`."""
        return self.load().search(queries, k)

    def load(self) -> DenseRetriever:
        """Return the retriever, with the vectors on the devices and the encoder loaded.

        Raises:
          ValueError: a vector is not finite, or a file of the encoder is malformed.
        """
        with self._lock:
            if self._dense is None:
                mesh = make_mesh(data=-1, fsdp=1, tensor=1)
                encode = E5(self._settings.encoder, mesh, prefix=QUERY)
                matrix = dense.load_matrix(self._vectors, mesh, self._settings.dtype)
                self._dense = DenseRetriever(matrix, encode, self._texts)
            return self._dense

    def resident(self, mesh: Mesh, k: int) -> Resident:
        """Return the vectors' use of the devices of a mesh."""
        vectors = self._vectors
        return dense.resident(vectors.rows, vectors.width, self._settings.dtype, mesh, k)
