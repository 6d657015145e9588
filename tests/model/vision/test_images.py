"""model/vision/images.py: pixels by hand and against transformers' processor."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.model.vision import images
from ragen_jax.model.vision.images import ImageConfig, config_from, preprocess, read_config, resized

pytestmark = pytest.mark.fast

PUBLISHED = ImageConfig()
SMALL = ImageConfig(min_pixels=56 * 56 * 4, max_pixels=28 * 28 * 30)
PLAIN = dict(image_mean=(0.0,) * 3, image_std=(1.0,) * 3)


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


# ---------------------------------------------------------------- by hand


def test_patches_by_hand():
    """Two by two tokens of two by two patches of two by two pixels: there is no resizing."""
    config = ImageConfig(0, 64, patch_size=2, temporal_patch_size=3, **PLAIN)
    image_HW3 = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    pixels_PC, grid = preprocess(image_HW3, config)
    assert grid == (1, 4, 4) and pixels_PC.shape == (16, 3 * 3 * 4)
    assert pixels_PC.dtype == np.float32
    # Upper left corners of the patches: the four patches of a token, then the next token to the
    # right.
    corners = [(0, 0), (0, 2), (2, 0), (2, 2), (0, 4), (0, 6), (2, 4), (2, 6)]
    corners += [(y + 4, x) for y, x in corners]
    for patch_C, (y, x) in zip(pixels_PC, corners, strict=True):
        block = image_HW3[y : y + 2, x : x + 2] / 255
        for colour in range(3):
            for frame in range(3):  # the same image in every frame of a patch
                at = (colour * 3 + frame) * 4
                np.testing.assert_allclose(
                    patch_C[at : at + 4], block[..., colour].ravel(), rtol=1e-6
                )


def test_mean_and_deviation_by_hand():
    image_HW3 = np.zeros((56, 56, 3), np.uint8)
    image_HW3[:] = (255, 0, 51)
    pixels_PC, grid = preprocess(image_HW3, PUBLISHED)
    assert grid == (1, 4, 4)
    red, green, blue = pixels_PC.reshape(16, 3, 2 * 14 * 14).transpose(1, 0, 2)
    np.testing.assert_allclose(red, (1 - 0.48145466) / 0.26862954, rtol=1e-6)
    np.testing.assert_allclose(green, -0.4578275 / 0.26130258, rtol=1e-6)
    np.testing.assert_allclose(blue, (0.2 - 0.40821073) / 0.27577711, rtol=1e-6)


@pytest.mark.parametrize(
    "size, config, want",
    [
        ((56, 56), PUBLISHED, (56, 56)),
        ((224, 112), PUBLISHED, (224, 112)),
        ((41, 43), ImageConfig(min_pixels=0), (28, 56)),  # 1.46 and 1.54 tokens
        ((42, 70), ImageConfig(min_pixels=0), (56, 56)),  # 1.5 and 2.5: rounded to the even number
        ((28, 28), PUBLISHED, (56, 56)),  # scaled by 2
        ((10, 10), PUBLISHED, (56, 56)),
        ((20, 80), PUBLISHED, (28, 112)),  # one token times 3 has too few pixels; scaled by 1.4
        ((400, 300), SMALL, (168, 112)),  # divided by 2.26: 177 and 132.8
        ((500, 10), SMALL, (812, 28)),  # scaled by 1.58: 792 and 15.8
    ],
)
def test_sizes_by_hand(size, config, want):
    assert resized(*size, config) == want
    assert images.image_grid(*size, config) == (1, want[0] // 14, want[1] // 14)


@pytest.mark.medium
@given(st.integers(1, 3000), st.integers(1, 3000))
@settings(max_examples=500, deadline=None)
def test_sizes_are_whole_tokens_within_the_limits(height, width):
    try:
        h, w = resized(height, width, PUBLISHED)
    except ValueError:
        assert max(height, width) > 200 * min(height, width)
        return
    assert h % 28 == 0 and w % 28 == 0
    assert PUBLISHED.min_pixels <= h * w <= PUBLISHED.max_pixels
    if PUBLISHED.min_pixels * 2 < height * width < PUBLISHED.max_pixels / 2:
        assert abs(h - height) <= 14 and abs(w - width) <= 14 or min(height, width) < 28


# ---------------------------------------------------------------- against transformers


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")


@pytest.mark.medium
@pytest.mark.parametrize(
    "size",
    [(100, 151), (9, 9), (10, 31), (400, 300), (300, 401), (60, 500), (500, 70), (112, 112)]
    + [(224, 224), (56, 168)],
    ids=lambda size: f"{size[0]}x{size[1]}",
)
@pytest.mark.parametrize("config", [PUBLISHED, SMALL], ids=["published", "small"])
def test_pixels_match_transformers(theirs, size, config):
    processor = theirs.Qwen2VLImageProcessorPil(
        min_pixels=config.min_pixels, max_pixels=config.max_pixels
    )
    image_HW3 = picture(*size, seed=size[0])
    want = processor(image_HW3, return_tensors="np", input_data_format="channels_last")
    got, grid = preprocess(image_HW3, config)
    assert grid == tuple(want["image_grid_thw"][0])
    np.testing.assert_allclose(got, want["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "limits", [(3136, 12845056), (3136, 1003520), (12544, 23520), (12544, 12544), (1, 784)]
)
def test_sizes_match_transformers(theirs, limits):
    """The sizes include exact multiples, where another order of operations would round differently.
    Where transformers exceeds the larger limit, ours raises an error."""
    config = ImageConfig(*limits)
    sizes = np.random.default_rng(0).integers(1, 2000, (4000, 2)).tolist()
    sizes += [(28 * i, 28 * j) for i in range(1, 50) for j in range(1, 50)]
    for size in sizes:
        try:
            want = theirs.smart_resize(*size, 28, *limits)
        except ValueError:
            want = None
        if want is None or want[0] * want[1] > limits[1]:
            with pytest.raises(ValueError, match="expected at most 200 times|more than max_pixels"):
                resized(*size, config)
        else:
            assert resized(*size, config) == want, size


# ---------------------------------------------------------------- settings


def write(folder, fields):
    (folder / images.FILE).write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    "fields, want",
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, PUBLISHED),
        ({"min_pixels": 12544, "max_pixels": 23520}, SMALL),
        ({"size": {"shortest_edge": 12544, "longest_edge": 23520}}, SMALL),
        ({"size": {"min_pixels": 12544, "max_pixels": 23520}, "min_pixels": None}, SMALL),
        (
            {"size": {"shortest_edge": 1, "longest_edge": 1000}, "max_pixels": 23520}
            | {"min_pixels": 12544},
            SMALL,
        ),
        ({"resample": 3, "do_resize": True, "rescale_factor": 1 / 255}, PUBLISHED),
        (
            {"patch_size": 16, "merge_size": 1, "temporal_patch_size": 1}
            | {"image_mean": [0, 0.5, 1], "image_std": [1, 2, 3]},
            ImageConfig(
                patch_size=16,
                merge_size=1,
                temporal_patch_size=1,
                image_mean=(0, 0.5, 1),
                image_std=(1, 2, 3),
            ),
        ),
    ],
)
def test_settings_in_a_file(tmp_path, fields, want):
    assert read_config(write(tmp_path, fields)) == want


def test_settings_that_transformers_writes(tmp_path, theirs):
    theirs.Qwen2VLImageProcessorPil(min_pixels=12544, max_pixels=23520).save_pretrained(tmp_path)
    assert read_config(tmp_path) == SMALL


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"do_resize": False}, "do_resize False is not supported; accepted: True"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "resample 2 is not supported; accepted: 3"),
        ({"rescale_factor": 1.0}, "rescale_factor 1.0"),
        ({"patch_size": 0}, "patch_size 0 must be a whole number from 1"),
        ({"merge_size": 2.5}, "merge_size 2.5 must"),
        (
            {"min_pixels": 900, "max_pixels": 800},
            "min_pixels 900, max_pixels 800: expected whole numbers with 0 <=",
        ),
        ({"min_pixels": 0, "max_pixels": 783}, r"at least one token, 28\^2 = 784"),
        ({"image_mean": [0.5]}, r"image_mean \(0.5,\).*expected three"),
        ({"image_std": [0, 1, 1]}, "image_std positive"),
        ({"image_std": 1}, "image_std 1: expected three"),
        ({"image_mean": [0.5, None, 0.5]}, "image_mean .*: expected three"),
        ({"max_pixels": "many"}, "max_pixels 'many': expected whole numbers"),
        ({"size": {"shortest_edge": [1]}}, r"min_pixels \[1\]"),
        ({"size": 224}, "size 224 must hold shortest_edge"),
        ("[]", "is not a JSON object"),
        ("[" * 200_000, "is not JSON"),
        ('{"patch', "is not JSON"),
    ],
)
def test_bad_settings_are_named(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message) as raised:
        read_config(write(tmp_path, fields))
    assert images.FILE in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("fields", [{}, {"processor_class": "Qwen2Processor"}])
def test_settings_of_a_model_that_reads_text_alone(tmp_path, fields):
    with pytest.raises(ValueError, match=f"{images.FILE} has no image settings.*copy"):
        read_config(write(tmp_path, fields))
    (tmp_path / images.FILE).rename(tmp_path / images.WHOLE)
    with pytest.raises(ValueError, match=f"{images.WHOLE} has no image settings") as raised:
        read_config(tmp_path)
    assert "\n" not in str(raised.value)


def test_settings_among_those_of_a_whole_processor(tmp_path):
    """transformers 5 saves a processor in one file; a separate image processor file takes
    precedence."""
    whole = {"image_processor": images.to_fields(SMALL), "processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / images.WHOLE).write_text(json.dumps(whole))
    assert read_config(tmp_path) == SMALL
    assert read_config(write(tmp_path, images.to_fields(PUBLISHED))) == PUBLISHED


@pytest.mark.parametrize("config", [PUBLISHED, SMALL], ids=["published", "small"])
def test_settings_are_written_as_transformers_writes_them(tmp_path, theirs, config):
    assert read_config(write(tmp_path, images.to_fields(config))) == config
    opened = theirs.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    plain = theirs.Qwen2VLImageProcessorPil(
        min_pixels=config.min_pixels, max_pixels=config.max_pixels
    )
    opened.save_pretrained(tmp_path / "opened")
    plain.save_pretrained(tmp_path / "plain")
    fields, want = (
        json.loads((tmp_path / name / images.FILE).read_text()) for name in ("opened", "plain")
    )
    assert {name: fields[name] for name in want} == want
    ours = json.loads((tmp_path / images.FILE).read_text())
    assert {name: ours[name] for name in want} == want


def test_no_settings(tmp_path):
    with pytest.raises(ValueError, match=f"no .*{images.FILE}; a model that reads images"):
        read_config(tmp_path)


def test_a_file_is_named_where_it_lies():
    with pytest.raises(ValueError, match="^here.json: resample 0"):
        config_from({"resample": 0}, "here.json")


# ---------------------------------------------------------------- bad images


@pytest.mark.parametrize(
    "image, message",
    [
        (np.zeros((9, 9, 3), np.float32), r"dtype float32 and shape \(9, 9, 3\); expected uint8"),
        (np.zeros((9, 9), np.uint8), r"shape \(9, 9\); expected uint8 \[height, width, 3\]"),
        (np.zeros((9, 9, 4), np.uint8), r"shape \(9, 9, 4\)"),
        (np.zeros((3, 9, 9), np.uint8), r"shape \(3, 9, 9\)"),
        (np.zeros((0, 9, 3), np.uint8), "0 x 9 pixels .*: expected at least one"),
        (np.zeros((2, 401, 3), np.uint8), "2 x 401 .* is 200.5 times the other, expected at most"),
        # Divided by 6.52, the sides are 1533.6 and 15.3; the short side keeps one token.
        (
            np.zeros((10_000, 100, 3), np.uint8),
            "1512 x 28 = 42336 pixels .* max_pixels 23520; raise",
        ),
    ],
)
def test_bad_images_are_named(image, message):
    with pytest.raises(ValueError, match=message) as raised:
        preprocess(image, SMALL)
    assert "\n" not in str(raised.value)
