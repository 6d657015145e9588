"""The images that a run shows, and the numbers that stand for their tokens.

    register  give numbers to new images
    span      image -> its numbers, which stand for it in prompts
    attach    parameters and rows of tokens -> parameters with the table of the images in the rows
    gradient  gradient of a table's embeddings -> gradient of the tower's adapters

The numbers of an image's tokens are unique and lie past the vocabulary. Rows that show different
images therefore differ wherever rows are compared, kept or dropped (positions.py). The tower
encodes every image once; if its adapters are trained (lora.py), once for each of their values.

Numbers are never reused. They are forgotten two epochs after they were assigned: each training
step begins an epoch, and rollouts that run ahead belong to the next step.

If several processes sample, they assign the same numbers and hold the same tables: each process
shares the images that it registers or shows with the others, and all processes must call these
functions together.
"""

import dataclasses
import functools
import hashlib
import io
import operator
import threading
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ragen_jax.core.sharding import gather_bytes, max_over_processes, place, process_count
from ragen_jax.core.types import Array, Params
from ragen_jax.model import lora
from ragen_jax.model.vision.images import Grid, image_grid, preprocess
from ragen_jax.model.vision.positions import NO_TOKEN, Images, table
from ragen_jax.model.vision.tower import Tower, VisionTower, see

LEAST_ROOM = 64  # rows of a table
# Images of one size that the tower encodes per call. The batch size is constant because on CPU the
# last digits depend on it, and an image's embedding must not depend on the rest of the batch.
AT_A_TIME = 16
SIGHTS = 3  # caches kept, one per set of adapters: the policy's on both meshes, and after an update


@dataclasses.dataclass(frozen=True)
class RegisteredImage:
    """An image with its numbers."""

    first: int  # first of its tokens' consecutive numbers
    grid: Grid  # its size in patches
    tokens: int
    pixels: np.ndarray  # uint8 [height, width, 3]


@dataclasses.dataclass
class TowerCache:
    """The tower's embeddings of images, computed with given adapters."""

    adapters: Params  # in the form that lora.attach returns; empty: no adapters
    seen: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # first number -> [I, D]
    # The last request and its table: the passes and updates of a step read the same table.
    last: tuple[tuple[Mesh, int, tuple[int, ...]], Images] | None = None


NO_VISION_TOWER = (
    "the environment shows images, but the model at config.model.path has no vision tower; use "
    "a model with one (preset qwen2.5-vl-3b or tiny-vl), or another "
    "config.env.options.observation"
)


class NoImages:
    """The table of a model without a vision tower: it holds no images and refuses every image."""

    tower = pad = None

    def begin_epoch(self) -> None:
        """Do nothing; see `ImageTable`."""

    def check(self, image: np.ndarray) -> None:
        """Raise ValueError, as the model cannot process any image."""
        raise ValueError(NO_VISION_TOWER)

    def register(self, images: Iterable[np.ndarray]) -> None:
        """Raise ValueError if there is an image."""
        for image in images:
            self.check(image)

    def span(self, image: np.ndarray) -> tuple[int, int]:
        """Raise ValueError, as no image is registered."""
        raise ValueError(NO_VISION_TOWER)

    def shift(self, tokens_T: np.ndarray) -> int:
        """Return 0: without images, the position after some tokens is their number."""
        return 0

    def attach(self, params: Params, *rows: Array) -> Params:
        """Return the parameters as they are."""
        return params


NO_IMAGES = NoImages()


class ImageTable:
    """Images by their content, with their numbers and embeddings."""

    def __init__(self, tower: Tower, vocab_size: int, pad: int | None = None) -> None:
        """Create an empty table.

        Args:
          vocab_size: that of the language model; numbers begin here.
          pad: id of the token that stands for images in the chat template; None: not known.
        """
        self.tower, self.vocab_size, self.pad = tower, vocab_size, pad
        self.next = vocab_size  # the next number to assign
        self.pages: list[dict[bytes, RegisteredImage]] = [{}]  # the previous and current epochs
        self.without = TowerCache({})
        self.sights: list[TowerCache] = []  # caches of the latest adapters
        self.room = LEAST_ROOM  # rows of a table; never shrinks, to limit the number of programs
        self.lock = threading.Lock()  # rollouts ahead encode images in parallel with updates
        self.towers: dict[Mesh, Params] = {}  # the tower's parameters on the meshes in use

    def begin_epoch(self) -> None:
        """Begin a new epoch; forget images registered before the previous epoch."""
        with self.lock:
            self.pages = [*self.pages[-1:], {}]
            kept = {met.first for page in self.pages for met in page.values()}
            for sight in (self.without, *self.sights):
                sight.seen = {first: x for first, x in sight.seen.items() if first in kept}

    def check(self, image: np.ndarray) -> None:
        """Raise ValueError if the model cannot process an image."""
        image_grid(*image.shape[:2], self.tower.images)

    def register(self, images: Iterable[np.ndarray]) -> None:
        """Assign numbers to the images that have none in this epoch, equally on all processes.

        Raises:
          ValueError: an image that the model cannot read (images.resized).
        """
        new = {}
        for image in images:
            key = _content(image)
            if key not in self.pages[-1]:
                new[key] = image
        (most,) = max_over_processes(len(new))
        if not most:
            return
        if process_count() > 1:
            gathered = gather_bytes(_to_bytes(new.values()))
            new = {_content(image): image for data in gathered for image in _from_bytes(data)}
        with self.lock:
            for key, image in new.items():
                if key not in self.pages[-1]:
                    self.pages[-1][key] = self._number(image)

    def _number(self, image: np.ndarray) -> RegisteredImage:
        grid = image_grid(*image.shape[:2], self.tower.images)
        tokens = grid[1] * grid[2] // self.tower.images.merge_size**2
        met = RegisteredImage(self.next, grid, tokens, image)
        self.next += tokens
        if self.next >= NO_TOKEN:
            raise RuntimeError("the run has shown more images than there are image numbers")
        return met

    def span(self, image: np.ndarray) -> tuple[int, int]:
        """Return (first, count) of an image's numbers.

        Raises:
          ValueError: the image was not registered in this epoch or the previous one.
        """
        key = _content(image)
        for page in reversed(self.pages):
            if key in page:
                return page[key].first, page[key].tokens
        raise ValueError(f"an image of shape {image.shape} is not registered, or was evicted")

    def shift(self, tokens_T: np.ndarray) -> int:
        """Return the position after some tokens minus their number; int <= 0."""
        past = tokens_T[tokens_T >= self.vocab_size]
        shown = self.shown(past)
        end_N = np.array([met.first + met.tokens - 1 for met in shown])
        side_N = np.array([max(self.sides(met)) for met in shown])
        return int(((past[:, None] == end_N) @ side_N).sum()) - len(past) if len(past) else 0

    def attach(self, params: Params, *rows: Array) -> Params:
        """Return the parameters with the table of images in rows of tokens, on the current mesh.

        If lora.attach has left adapters of the tower in `params`, the tower uses them, and they are
        left out of the result.
        """
        kept = {name: x for name, x in params.items() if name != "tower"}
        return kept | {"images": self.table(*rows, adapters=params.get("tower"))}

    def table(self, *rows: Array, adapters: Params | None = None) -> Images:
        """Return the `Images` in rows of tokens, replicated on every device of the current mesh.

        Args:
          adapters: the tower's adapters and their scale, in the form that lora.attach returns; on
            this mesh.

        Raises:
          ValueError: a number that stands for no image, or for a forgotten image.
        """
        with self.lock:
            shown = self._shown_by_all(*rows)
            sight = self._sight(adapters)
            self._encode([met for met in shown if met.first not in sight.seen], sight)
            size = sum(met.tokens for met in shown)
            while self.room < size:
                self.room *= 2
            mesh = jax.sharding.get_mesh()
            asked = mesh, self.room, tuple(met.first for met in shown)
            if sight.last is not None and sight.last[0] == asked:
                return sight.last[1]
            width = self.tower.model.config.out_hidden_size
            embeds = [np.zeros((0, width), jnp.dtype(self.tower.model.config.dtype))]
            embeds += [sight.seen[met.first] for met in shown]
            sides = [(met.first, *self.sides(met)) for met in shown]
            images = table(sides, np.concatenate(embeds), self.room)
            if not mesh.empty:
                images = place(images, NamedSharding(mesh, PartitionSpec()))
            sight.last = asked, images
            return images

    def gradient(self, adapters: Params, grad_ID: Array, *rows: Array) -> Params:
        """Return the gradient with respect to the tower's adapters.

        Args:
          adapters: as in `table`.
          grad_ID: gradient with respect to the embeddings of `table(*rows, adapters=adapters)`,
            including its padding; replicated on every device.

        Returns:
          float32, in the form of a tower's adapters (lora.py); zeros if no image has a gradient.
        """
        with self.lock:
            shown = self._shown_by_all(*rows)
            grad_ID = np.asarray(grad_ID, np.float32)
            ends = np.cumsum([met.tokens for met in shown])
            grads = {
                met.first: grad_ID[end - met.tokens : end]
                for met, end in zip(shown, ends, strict=True)
            }
            counting = [met for met in shown if grads[met.first].any()]
            pairs, scale = {"layers": adapters["layers"]}, adapters["scale"]
            total = jax.tree.map(jnp.zeros_like, pairs)
            for grid, some, patches in self._batches(counting):
                width = grad_ID.shape[1]
                grad_NID = np.zeros((AT_A_TIME, some[0].tokens, width), np.float32)
                grad_NID[: len(some)] = [grads[met.first] for met in some]
                more = tower_gradient(
                    self.tower.model, self._params(), pairs, scale, patches, grid, grad_NID
                )
                total = jax.tree.map(jnp.add, total, more)
            return total

    def _sight(self, adapters: Params | None) -> TowerCache:
        """Return the cache for adapters, which are identified by their (immutable) arrays."""
        if adapters is None:
            return self.without
        leaves = jax.tree.leaves(adapters["layers"])
        for sight in self.sights:
            known = jax.tree.leaves(sight.adapters["layers"])
            if len(known) == len(leaves) and all(map(operator.is_, known, leaves)):
                return sight
        self.sights = [*self.sights, TowerCache(adapters)][-SIGHTS:]
        return self.sights[-1]

    def sides(self, met: RegisteredImage) -> tuple[int, int]:
        """Return the numbers of an image's token rows and columns."""
        merge = self.tower.images.merge_size
        return met.grid[1] // merge, met.grid[2] // merge

    def _shown_by_all(self, *rows: Array) -> list[RegisteredImage]:
        """Return `shown` for the rows of all processes."""
        shown = self.shown(*rows)
        if process_count() == 1:
            return shown
        gathered = gather_bytes(np.array([met.first for met in shown], np.int32).tobytes())
        return self.shown(*(np.frombuffer(data, np.int32) for data in gathered))

    def shown(self, *rows: Array) -> list[RegisteredImage]:
        """Return the images that rows of tokens show, each once, by rising number."""
        past = [np.asarray(row).reshape(-1) for row in rows]
        past = [np.zeros(0, np.int32), *(row[row >= self.vocab_size] for row in past)]
        numbers = np.unique(np.concatenate(past))
        known = [met for page in self.pages for met in page.values()]  # by rising number
        end_N = np.array([0, *(met.first + met.tokens for met in known)])
        first_N = np.array([met.first for met in known], np.int64)
        at = np.searchsorted(first_N, numbers, side="right")  # after its image's index
        lost = numbers[numbers >= end_N[at]]
        if len(lost):
            raise ValueError(
                f"{len(lost)} ids past the vocabulary of {self.vocab_size}, from {lost[0]} on, "
                "are not registered images"
            )
        return [known[i - 1] for i in np.unique(at)]

    def _encode(self, images: list[RegisteredImage], sight: TowerCache) -> None:
        """Encode images with the tower and cache their embeddings."""
        params = self._params()
        if images and sight.adapters:
            a = sight.adapters
            params = lora.attach(params, {"layers": a["layers"]}, scale=a["scale"])
        for grid, some, patches_NPC in self._batches(images):
            found = see(self.tower.model, params, patches_NPC, grid)
            for met, embed in zip(some, np.asarray(found), strict=False):
                sight.seen[met.first] = embed

    def _batches(
        self, images: list[RegisteredImage]
    ) -> Iterator[tuple[Grid, list[RegisteredImage], np.ndarray]]:
        """Yield (grid, at most AT_A_TIME images of it, patches [AT_A_TIME, P, C] with padding)."""
        by_grid: dict[Grid, list[RegisteredImage]] = {}
        for met in images:
            by_grid.setdefault(met.grid, []).append(met)
        for grid, same in by_grid.items():
            for start in range(0, len(same), AT_A_TIME):
                some = same[start : start + AT_A_TIME]
                patches = [preprocess(met.pixels, self.tower.images)[0] for met in some]
                padded = np.zeros((AT_A_TIME, *patches[0].shape), np.float32)
                padded[: len(some)] = patches
                yield grid, some, padded

    def _params(self) -> Params:
        """Return the tower's parameters on the current mesh."""
        mesh, params = jax.sharding.get_mesh(), self.tower.params
        if mesh.empty:
            return params
        if mesh not in self.towers:

            def layout(x):
                own = getattr(x.sharding, "spec", PartitionSpec())
                return NamedSharding(mesh, own)

            self.towers[mesh] = jax.device_put(params, jax.tree.map(layout, params))
        return self.towers[mesh]


ImageSource = ImageTable | NoImages  # the images of a run


@functools.partial(jax.jit, static_argnames=("tower", "grid"))
def tower_gradient(
    tower: VisionTower,
    params: Params,
    adapters: Params,
    scale: Array,
    pixels_NPC: Array,
    grid: Grid,
    grad_NID: Array,
) -> Params:
    """Return the adapters' gradient, given the gradient of the images' embeddings."""
    again = tower.clone(remat=True)

    def look(adapters):
        attached = lora.attach(params, adapters, scale=scale)
        return again.apply({"params": attached}, jnp.asarray(pixels_NPC), grid)

    embed_NID, back = jax.vjp(look, adapters)
    (grads,) = back(jnp.asarray(grad_NID, embed_NID.dtype))
    return grads


def _content(image: np.ndarray) -> bytes:
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest()


def _to_bytes(images: Iterable[np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{str(i): x for i, x in enumerate(images)})
    return file.getvalue()


def _from_bytes(data: bytes) -> list[np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return [file[str(i)] for i in range(len(file.files))]
