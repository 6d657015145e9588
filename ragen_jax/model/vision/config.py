"""What a model sees with, as shapes: its vision tower, and the tokens that images stand at.

A file of its own, because the shape of a language model (qwen.py) says what sees for it, while the
tower (vision.py) is made of that module's parts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Shape of a tower, in the terms of `vision_config` in a config.json.

    Raises:
      ValueError: fields that do not fit each other.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # the language model's width
    fullatt_block_indexes: tuple[int, ...]  # layers that attend to the whole image
    window_size: int = 112  # pixels along a side of a window
    patch_size: int = 14  # pixels
    temporal_patch_size: int = 2  # frames of a patch
    spatial_merge_size: int = 2  # patches along a side of what one token shows
    in_channels: int = 3
    tokens_per_second: int = 4  # of a film: not read here, and written as it was
    dtype: str = "float32"  # of activations and matrix products; parameters keep their own

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
        """C: the numbers of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """Ids of the tokens that images stand at."""

    start: int  # <|vision_start|>, before an image
    pad: int  # <|image_pad|>, one for each of its embeddings
    end: int  # <|vision_end|>, behind it
    video: int  # <|video_pad|>: not read here, and written as it was
