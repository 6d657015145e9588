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

MIN_CAPACITY = 64  # rows of a table
# Images of one size that the tower encodes per call. The batch size is constant because on CPU the
# last digits depend on it, and an image's embedding must not depend on the rest of the batch.
AT_A_TIME = 16
MAX_CACHES = (
    3  # caches kept, one per set of adapters: the policy's on both meshes, and after an update
)


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
        self.earlier_epochs = 1  # number of epochs before the current one whose images are kept
        self.epochs: list[dict[bytes, RegisteredImage]] = [{}]  # the current epoch is the last
        self.without = TowerCache({})
        self.caches: list[TowerCache] = []  # caches of the latest adapters
        self.capacity = (
            MIN_CAPACITY  # rows of a table; never shrinks, to limit the number of programs
        )
        self.lock = threading.Lock()  # rollouts ahead encode images in parallel with updates
        self.towers: dict[Mesh, Params] = {}  # the tower's parameters on the meshes in use

    def begin_epoch(self) -> None:
        """Begin a new epoch; forget images registered before the `earlier_epochs`."""
        with self.lock:
            self.epochs = [*self.epochs[-self.earlier_epochs :], {}]
            kept = {image.first for epoch in self.epochs for image in epoch.values()}
            for cache in (self.without, *self.caches):
                cache.seen = {first: x for first, x in cache.seen.items() if first in kept}

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
            if key not in self.epochs[-1]:
                new[key] = image
        (most,) = max_over_processes(len(new))
        if not most:
            return
        if process_count() > 1:
            gathered = gather_bytes(_to_bytes(new.values()))
            new = {_content(image): image for data in gathered for image in _from_bytes(data)}
        with self.lock:
            for key, image in new.items():
                if key not in self.epochs[-1]:
                    self.epochs[-1][key] = self._number(image)

    def _number(self, image: np.ndarray) -> RegisteredImage:
        grid = image_grid(*image.shape[:2], self.tower.images)
        tokens = grid[1] * grid[2] // self.tower.images.merge_size**2
        registered = RegisteredImage(self.next, grid, tokens, image)
        self.next += tokens
        if self.next >= NO_TOKEN:
            raise RuntimeError("the run has shown more images than there are image numbers")
        return registered

    def span(self, image: np.ndarray) -> tuple[int, int]:
        """Return (first, count) of an image's numbers.

        Raises:
          ValueError: the image was not registered in the kept epochs.
        """
        key = _content(image)
        for epoch in reversed(self.epochs):
            if key in epoch:
                return epoch[key].first, epoch[key].tokens
        raise ValueError(f"an image of shape {image.shape} is not registered, or was evicted")

    def shift(self, tokens_T: np.ndarray) -> int:
        """Return the position after some tokens minus their number; int <= 0."""
        past = tokens_T[tokens_T >= self.vocab_size]
        registered = self.images_of(past)
        end_N = np.array([image.first + image.tokens - 1 for image in registered])
        side_N = np.array([max(self.grid_size(image)) for image in registered])
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
            registered = self._images_of_all_processes(*rows)
            cache = self._tower_cache(adapters)
            self._encode([image for image in registered if image.first not in cache.seen], cache)
            size = sum(image.tokens for image in registered)
            while self.capacity < size:
                self.capacity *= 2
            mesh = jax.sharding.get_mesh()
            key = mesh, self.capacity, tuple(image.first for image in registered)
            if cache.last is not None and cache.last[0] == key:
                return cache.last[1]
            width = self.tower.model.config.out_hidden_size
            embeds = [np.zeros((0, width), jnp.dtype(self.tower.model.config.dtype))]
            embeds += [cache.seen[image.first] for image in registered]
            grids = [(image.first, *self.grid_size(image)) for image in registered]
            images = table(grids, np.concatenate(embeds), self.capacity)
            if not mesh.empty:
                images = place(images, NamedSharding(mesh, PartitionSpec()))
            cache.last = key, images
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
            registered = self._images_of_all_processes(*rows)
            grad_ID = np.asarray(grad_ID, np.float32)
            ends = np.cumsum([image.tokens for image in registered])
            grads = {
                image.first: grad_ID[end - image.tokens : end]
                for image, end in zip(registered, ends, strict=True)
            }
            counting = [image for image in registered if grads[image.first].any()]
            pairs, scale = {"layers": adapters["layers"]}, adapters["scale"]
            total = jax.tree.map(jnp.zeros_like, pairs)
            for grid, some, patches in self._batches(counting):
                width = grad_ID.shape[1]
                grad_NID = np.zeros((AT_A_TIME, some[0].tokens, width), np.float32)
                grad_NID[: len(some)] = [grads[image.first] for image in some]
                more = tower_gradient(
                    self.tower.model, self._params(), pairs, scale, patches, grid, grad_NID
                )
                total = jax.tree.map(jnp.add, total, more)
            return total

    def _tower_cache(self, adapters: Params | None) -> TowerCache:
        """Return the cache for adapters, which are identified by their (immutable) arrays."""
        if adapters is None:
            return self.without
        leaves = jax.tree.leaves(adapters["layers"])
        for cache in self.caches:
            cached = jax.tree.leaves(cache.adapters["layers"])
            if len(cached) == len(leaves) and all(map(operator.is_, cached, leaves)):
                return cache
        self.caches = [*self.caches, TowerCache(adapters)][-MAX_CACHES:]
        return self.caches[-1]

    def grid_size(self, image: RegisteredImage) -> tuple[int, int]:
        """Return the numbers of an image's token rows and columns."""
        merge = self.tower.images.merge_size
        return image.grid[1] // merge, image.grid[2] // merge

    def _images_of_all_processes(self, *rows: Array) -> list[RegisteredImage]:
        """Return `images_of` for the rows of all processes."""
        registered = self.images_of(*rows)
        if process_count() == 1:
            return registered
        gathered = gather_bytes(np.array([image.first for image in registered], np.int32).tobytes())
        return self.images_of(*(np.frombuffer(data, np.int32) for data in gathered))

    def images_of(self, *rows: Array) -> list[RegisteredImage]:
        """Return the images that rows of tokens show, each once, by rising number."""
        past = [np.asarray(row).reshape(-1) for row in rows]
        past = [np.zeros(0, np.int32), *(row[row >= self.vocab_size] for row in past)]
        numbers = np.unique(np.concatenate(past))
        registered = [
            image for epoch in self.epochs for image in epoch.values()
        ]  # by rising number
        end_N = np.array([0, *(image.first + image.tokens for image in registered)])
        first_N = np.array([image.first for image in registered], np.int64)
        at = np.searchsorted(first_N, numbers, side="right")  # after its image's index
        lost = numbers[numbers >= end_N[at]]
        if len(lost):
            raise ValueError(
                f"{len(lost)} ids past the vocabulary of {self.vocab_size}, from {lost[0]} on, "
                "are not registered images"
            )
        return [registered[i - 1] for i in np.unique(at)]

    def _encode(self, images: list[RegisteredImage], cache: TowerCache) -> None:
        """Encode images with the tower and cache their embeddings."""
        params = self._params()
        if images and cache.adapters:
            a = cache.adapters
            params = lora.attach(params, {"layers": a["layers"]}, scale=a["scale"])
        for grid, some, patches_NPC in self._batches(images):
            found = see(self.tower.model, params, patches_NPC, grid)
            for image, embed in zip(some, np.asarray(found), strict=False):
                cache.seen[image.first] = embed

    def _batches(
        self, images: list[RegisteredImage]
    ) -> Iterator[tuple[Grid, list[RegisteredImage], np.ndarray]]:
        """Yield (grid, at most AT_A_TIME images of it, patches [AT_A_TIME, P, C] with padding)."""
        by_grid: dict[Grid, list[RegisteredImage]] = {}
        for image in images:
            by_grid.setdefault(image.grid, []).append(image)
        for grid, same in by_grid.items():
            for start in range(0, len(same), AT_A_TIME):
                some = same[start : start + AT_A_TIME]
                patches = [preprocess(image.pixels, self.tower.images)[0] for image in some]
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
