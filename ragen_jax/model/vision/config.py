"""Shapes for vision: the vision tower, and the tokens that stand for images.

This is a separate file to avoid an import cycle: the shape of a language model (qwen.py) includes
its tower's shape, and the tower (tower.py) is built from parts of qwen.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Shape of a tower, with the names of `vision_config` in a config.json.

    Raises:
      ValueError: inconsistent fields.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # the language model's width
    fullatt_block_indexes: tuple[int, ...]  # layers that attend to the whole image
    window_size: int = 112  # pixels along a side of a window
    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames per patch
    spatial_merge_size: int = 2  # patches along a side of the square that one token shows
    in_channels: int = 3
    tokens_per_second: int = 4  # for video: not used here, written back unchanged
    dtype: str = "float32"  # dtype of activations and matrix products; not of the parameters

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config: hidden_size {self.hidden_size} / num_heads {self.num_heads} "
                "must be a multiple of 4: rotary embedding uses half of a head for the row and "
                "half for the column"
            )
        token = self.patch_size * self.spatial_merge_size
        if self.window_size < token:
            raise ValueError(
                f"vision_config: window_size {self.window_size} must be at least "
                f"patch_size * spatial_merge_size = {token}, the side of one token"
            )
        if not set(self.fullatt_block_indexes) <= set(range(self.depth)):
            raise ValueError(
                f"vision_config: fullatt_block_indexes {self.fullatt_block_indexes} must be layers "
                f"from 0 to depth - 1 = {self.depth - 1}"
            )

    @property
    def patch_numbers(self) -> int:
        """C: how many numbers a patch has."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """Ids of the tokens that stand for images."""

    start: int  # <|vision_start|>, before an image
    pad: int  # <|image_pad|>, one for each of its embeddings
    end: int  # <|vision_end|>, after an image
    video: int  # <|video_pad|>: not used here, written back unchanged
