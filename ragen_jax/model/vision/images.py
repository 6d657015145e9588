"""Images as the vision tower reads them: resized, normalised, cut into patches. NumPy and Pillow.

The results match the processor that Qwen2.5-VL was trained with (arXiv 2409.12191, section 2.1: any
resolution). An image keeps its aspect ratio as far as whole tokens allow, is resized with Pillow's
bicubic filter, and is repeated `temporal_patch_size` times, like a still video.

Axes: H, W pixels of an image, 3 colours, P patches, C numbers of a patch.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ragen_jax.storage import limits

Grid = tuple[int, int, int]  # numbers of patches of an image along time (1), height and width

FILE = "preprocessor_config.json"
WHOLE = "processor_config.json"  # written by transformers 5; contains FILE's fields
MAX_ASPECT = 200  # largest ratio of the longer side to the shorter
BICUBIC = 3  # Pillow's number of this filter, in FILE
DONE = {  # field of FILE -> the only supported value
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Settings of image preprocessing; the defaults are those of the published Qwen2.5-VL.

    Raises:
      ValueError: fields that no image could satisfy.
    """

    min_pixels: int = 56 * 56  # smaller images are enlarged to this number of pixels
    max_pixels: int = 16384 * 28 * 28  # larger images are reduced to this number of pixels
    patch_size: int = 14  # pixels along a side of a patch
    temporal_patch_size: int = 2  # frames per patch
    merge_size: int = 2  # patches along a side of the square that one token shows
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # of colours in 0..1
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{FILE}: {name} {value!r} must be a whole number from 1")
        limits = self.min_pixels, self.max_pixels
        if not all(isinstance(value, int) for value in limits) or not (
            self.token_side**2 <= self.max_pixels and 0 <= self.min_pixels <= self.max_pixels
        ):
            raise ValueError(
                f"{FILE}: min_pixels {self.min_pixels!r}, max_pixels {self.max_pixels!r}: "
                "expected whole numbers with 0 <= min_pixels <= max_pixels, and max_pixels of "
                f"at least one token, {self.token_side}^2 = {self.token_side**2}"
            )
        if not _three(self.image_mean) or not _three(self.image_std) or min(self.image_std) <= 0:
            raise ValueError(
                f"{FILE}: image_mean {self.image_mean!r}, image_std {self.image_std!r}: "
                "expected three numbers each, image_std positive"
            )

    @property
    def token_side(self) -> int:
        """Pixels along a side of the square that one token shows."""
        return self.patch_size * self.merge_size


def _three(colours: object) -> bool:
    """Return whether a value is three finite numbers."""
    return (
        isinstance(colours, tuple)
        and len(colours) == 3
        and all(isinstance(x, int | float) and math.isfinite(x) for x in colours)
    )


def read_config(directory: str | Path) -> ImageConfig:
    """Read the settings in a model directory's preprocessor_config.json.

    Without that file, read processor_config.json, which transformers 5 writes.

    Raises:
      ValueError: neither file exists, or it is damaged, has no image settings, or asks for
        unsupported processing.
    """
    file, whole = Path(directory) / FILE, Path(directory) / WHOLE
    if whole.exists() and not file.exists():
        file, fields = whole, _read(whole).get("image_processor")
    else:
        fields = _read(file)
    ours = (field.name for field in dataclasses.fields(ImageConfig))
    known = {"image_processor_type", "size", *ours, *DONE}
    if not isinstance(fields, dict) or not known & fields.keys():
        raise ValueError(
            f"{file} has no image settings, but the model reads images; copy {FILE} from the "
            "base model"
        )
    return config_from(fields, str(file))


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = limits.read_json(file)
    except FileNotFoundError as error:
        raise ValueError(f"no {file}; a model that reads images needs it") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a JSON object")
    return fields


def config_from(fields: dict[str, Any], file: str = FILE) -> ImageConfig:
    """Return the `ImageConfig` for the fields of a preprocessor_config.json, with its defaults.

    The limits are min_pixels and max_pixels, or shortest_edge and longest_edge in `size` (which
    are numbers of pixels as well), depending on the version of transformers.

    Raises:
      ValueError: fields that ask for unsupported processing; the message names `file`.
    """
    for name, known in DONE.items():
        value = fields.get(name)
        if value is not None and value != known:
            raise ValueError(f"{file}: {name} {value!r} is not supported; accepted: {known!r}")
    size = fields.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{file}: size {size!r} must hold shortest_edge and longest_edge")
    found: dict[str, Any] = {
        "min_pixels": size.get("min_pixels") or size.get("shortest_edge"),
        "max_pixels": size.get("max_pixels") or size.get("longest_edge"),
    }
    for field in dataclasses.fields(ImageConfig):
        if fields.get(field.name) is not None:
            value = fields[field.name]
            found[field.name] = tuple(value) if isinstance(value, list) else value
    return ImageConfig(**{name: value for name, value in found.items() if value is not None})


def to_fields(config: ImageConfig) -> dict[str, Any]:
    """Return a preprocessor_config.json with the settings, for every version of transformers."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "do_convert_rgb": True,
        **DONE,
        # The limits by both names: versions of transformers 4 forget those in `size`.
        **dataclasses.asdict(config),
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
    }


def resized(height: int, width: int, config: ImageConfig) -> tuple[int, int]:
    """Return the (height, width) in pixels to resize an image to: whole tokens, within the limits.

    Each side becomes the nearest multiple of a token's side. If the limits are then violated, both
    sides are instead scaled so that their product meets the limit, and rounded inwards.

    Raises:
      ValueError: no pixels, too large an aspect ratio, or too many pixels even after resizing.
    """
    shown = f"an image of {height} x {width} pixels (height x width)"
    if min(height, width) < 1:
        raise ValueError(f"{shown}: expected at least one; check the code that draws it")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"{shown}: one side is {max(height, width) / min(height, width):.1f} times the "
            f"other, expected at most {MAX_ASPECT} times; crop or pad it where it is drawn"
        )
    # The order of operations is the processor's, so that exact multiples are not rounded.
    side, sides = config.token_side, (height, width)
    h, w = (round(length / side) * side for length in sides)
    if h * w > config.max_pixels:
        scale = math.sqrt(height * width / config.max_pixels)
        h, w = (max(side, math.floor(length / scale / side) * side) for length in sides)
    elif h * w < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (height * width))
        h, w = (math.ceil(length * scale / side) * side for length in sides)
    if h * w > config.max_pixels:
        raise ValueError(
            f"{shown} becomes {h} x {w} = {h * w} pixels in whole tokens of {side} x {side}, "
            f"more than max_pixels {config.max_pixels}; raise max_pixels or lower min_pixels "
            f"({config.min_pixels}) in {FILE}, or crop the image where it is drawn"
        )
    return h, w


def image_grid(height: int, width: int, config: ImageConfig) -> Grid:
    """Return the grid (1, h, w) of an image, which takes h * w / merge_size^2 tokens.

    Raises:
      ValueError: see `resized`.
    """
    h, w = resized(height, width, config)
    return 1, h // config.patch_size, w // config.patch_size


def preprocess(image_HW3: np.ndarray, config: ImageConfig) -> tuple[np.ndarray, Grid]:
    """Convert an image to the patches that `VisionTower` reads.

    Args:
      image_HW3: uint8; red, green and blue from 0 to 255.

    Returns:
      (float32 [P, C], the grid (1, h, w) with P = h * w). Squares of merge_size x merge_size
      patches come row by row, the patches of a square consecutively. The order within C is colour,
      frame, row, column.

    Raises:
      ValueError: a wrong dtype or shape, or see `resized`.
    """
    image_HW3 = np.asarray(image_HW3)
    if image_HW3.dtype != np.uint8 or image_HW3.ndim != 3 or image_HW3.shape[2] != 3:
        raise ValueError(
            f"an image has dtype {image_HW3.dtype} and shape {image_HW3.shape}; expected uint8 "
            "[height, width, 3], RGB from 0 to 255; convert it where it is drawn"
        )
    c = config
    h, w = resized(*image_HW3.shape[:2], c)
    picture = Image.fromarray(image_HW3).resize((w, h), Image.Resampling.BICUBIC)
    colour = np.asarray(picture).astype(np.float32) * np.float32(1 / 255)
    mean, std = (np.array(x, np.float32) for x in (c.image_mean, c.image_std))
    colour = (colour - mean) / std

    rows, columns = h // c.token_side, w // c.token_side
    m, p = c.merge_size, c.patch_size
    patches = colour.reshape(rows, m, p, columns, m, p, 3)
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5)  # row, column, row and column within, 3, p, p
    frames = np.repeat(patches[:, :, :, :, :, None], c.temporal_patch_size, axis=5)
    return frames.reshape(rows * m * columns * m, -1), (1, rows * m, columns * m)
