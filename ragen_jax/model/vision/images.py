"""Images as the vision tower reads them: resized, normalised, cut into patches. NumPy and Pillow.

The numbers are those of the processor that Qwen2.5-VL was trained with (arXiv 2409.12191, section
2.1: any resolution): an image keeps its shape as far as whole tokens allow, is resized by Pillow's
bicubic filter, and is shown `temporal_patch_size` times, as a film that stands still.

Axes: H, W pixels of an image, 3 colours, P patches, C numbers of a patch.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ragen_jax.storage import limits

Grid = tuple[int, int, int]  # patches of an image along time (1), height and width

FILE = "preprocessor_config.json"
WHOLE = "processor_config.json"  # of transformers 5, which holds FILE's fields among others
MAX_ASPECT = 200  # of the longer side to the shorter
BICUBIC = 3  # Pillow's number of this filter, in FILE
DONE = {  # field of FILE -> the one value that is done here
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """What an image is made into; defaults are those of the published Qwen2.5-VL.

    Raises:
      ValueError: fields that no image could satisfy.
    """

    min_pixels: int = 56 * 56  # of a resized image: smaller ones are enlarged
    max_pixels: int = 16384 * 28 * 28  # larger ones are reduced
    patch_size: int = 14  # pixels along a side of a patch
    temporal_patch_size: int = 2  # frames of a patch
    merge_size: int = 2  # patches along a side of what one token shows
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # of colours from 0 to 1
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
        """Pixels along a side of what one token shows."""
        return self.patch_size * self.merge_size


def _three(colours: object) -> bool:
    """Whether it is three finite numbers."""
    return (
        isinstance(colours, tuple)
        and len(colours) == 3
        and all(isinstance(x, int | float) and math.isfinite(x) for x in colours)
    )


def read_config(directory: str | Path) -> ImageConfig:
    """The settings in a model directory's preprocessor_config.json.

    Where there is none, those in processor_config.json, as processors of transformers 5 are saved.

    Raises:
      ValueError: there is no such file, it is damaged, says nothing of images, or asks for what is
        not done here.
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
    """`ImageConfig` of the fields of a preprocessor_config.json; absent ones have its defaults.

    Limits stand as min_pixels and max_pixels, by these names or as shortest_edge and longest_edge
    (which are numbers of pixels, too) in `size`, as transformers has written them over time.

    Raises:
      ValueError: fields that ask for what is not done here, named with `file`.
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
    """A preprocessor_config.json of the settings, for every version of transformers."""
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
    """(height, width) in pixels that an image is resized to: whole tokens, within the limits.

    Each side becomes the nearest multiple of a token's. Where the limits are then exceeded, both
    sides are first multiplied by what brings their product to the limit, and rounded inwards.

    Raises:
      ValueError: no pixels, sides too different, or too many pixels however it is resized.
    """
    shown = f"an image of {height} x {width} pixels (height x width)"
    if min(height, width) < 1:
        raise ValueError(f"{shown}: expected at least one; check the code that draws it")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"{shown}: one side is {max(height, width) / min(height, width):.1f} times the "
            f"other, expected at most {MAX_ASPECT} times; crop or pad it where it is drawn"
        )
    # In the order of the processor's operations: what is an exact multiple must not be rounded off.
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
    """(1, h, w): the patches of an image of so many pixels. It takes h * w / merge_size^2 tokens.

    Raises:
      ValueError: see `resized`.
    """
    h, w = resized(height, width, config)
    return 1, h // config.patch_size, w // config.patch_size


def preprocess(image_HW3: np.ndarray, config: ImageConfig) -> tuple[np.ndarray, Grid]:
    """An image as the patches that `VisionTower` reads.

    Args:
      image_HW3: uint8, red, green, blue from 0 to 255.

    Returns:
      (float32 [P, C], the grid (1, h, w) with P = h * w). Squares of merge_size x merge_size
      patches row by row, the patches of a square behind each other; C: colour, frame, row, column.

    Raises:
      ValueError: another dtype or shape, or see `resized`.
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
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5)  # row, column, row and column in it, 3, p, p
    frames = np.repeat(patches[:, :, :, :, :, None], c.temporal_patch_size, axis=5)
    return frames.reshape(rows * m * columns * m, -1), (1, rows * m, columns * m)
