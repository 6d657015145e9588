"""Make the tiny Qwen2.5-VL in this folder, and its log-probs for rows with pictures, with torch.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch transformers safetensors pillow
    /tmp/torch/bin/python tests/model/reference/make_qwen2_5_vl.py

Made with torch 2.13.0 and transformers 5.23.0. test_seeing.py compares our model with it, so the
test suite needs no torch. A rerun reproduces the committed files byte for byte.

rows.npz: picture_0, _1, _2 uint8 [H, W, 3]; pixels_0, _1, _2 and grid_0, _1, _2, the output of the
image processor for them; tokens_BT int32, right-padded with 0; length_B; pictures_BK, the pictures
that a row shows, -1: none; positions_3BT of get_rope_index; logp_BT float32, entry t is log p(token
t | tokens < t), entry 0 is 0.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent / "qwen2_5_vl"
VOCAB, START, END, PAD = 64, 58, 59, 60
SIZES = ((20, 30), (9, 9), (90, 50))  # nearly unchanged, enlarged, reduced
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    bos_token_id=0,
    eos_token_id=1,
)
VISION = dict(
    depth=3,
    hidden_size=16,
    intermediate_size=20,
    num_heads=2,
    out_hidden_size=32,
    patch_size=4,
    window_size=16,  # 2 x 2 tokens
    fullatt_block_indexes=[1],
)


def make():
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=PAD,
        video_token_id=61,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():  # default biases and norms would hide errors
            norm = "norm" in key or "ln_q" in key
            p.normal_(1.0 if norm else 0.0, 0.3 if p.ndim == 1 else 0.15)
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=16**2, max_pixels=40**2)
    model.save_pretrained(HERE)
    processor.save_pretrained(HERE)

    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]
    made = [processor(x, return_tensors="np", input_data_format="channels_last") for x in pictures]
    pixels = [x["pixel_values"] for x in made]
    grids = [x["image_grid_thw"][0] for x in made]

    def text(count):
        return rng.integers(2, START, count).tolist()

    def show(k):
        return [START, *[PAD] * (int(grids[k].prod()) // 4), END]

    rows = [
        ([*text(3), *show(0), *text(5)], [0]),
        ([*text(1), *show(2), *text(2), *show(1), *text(3)], [2, 1]),
        (text(17), []),
        ([*text(2), *show(1), *text(6), *show(2), *show(0), *text(2)], [1, 2, 0]),
    ]
    length_B = np.array([len(tokens) for tokens, _ in rows], np.int32)
    tokens_BT = np.zeros((len(rows), length_B.max()), np.int32)
    pictures_BK = np.full((len(rows), 3), -1, np.int32)
    for b, (tokens, ks) in enumerate(rows):
        tokens_BT[b, : len(tokens)], pictures_BK[b, : len(ks)] = tokens, ks
    ids = torch.tensor(tokens_BT).long()
    mask = torch.arange(ids.shape[1]) < torch.tensor(length_B)[:, None]
    order = [k for _, ks in rows for k in ks]
    seen = dict(
        image_grid_thw=torch.tensor(np.stack([grids[k] for k in order])),
        mm_token_type_ids=(ids == PAD).int(),
        attention_mask=mask.long(),
    )
    with torch.no_grad():
        positions_3BT, _ = model.model.get_rope_index(ids, **seen)
        pixel_values = torch.tensor(np.concatenate([pixels[k] for k in order]))
        logp = model(ids, pixel_values=pixel_values, **seen).logits.log_softmax(-1)
    logp = logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    np.savez(
        HERE / "rows.npz",
        **{f"picture_{k}": x for k, x in enumerate(pictures)},
        **{f"pixels_{k}": x for k, x in enumerate(pixels)},
        **{f"grid_{k}": x.astype(np.int32) for k, x in enumerate(grids)},
        tokens_BT=tokens_BT,
        length_B=length_B,
        pictures_BK=pictures_BK,
        positions_3BT=positions_3BT.numpy().astype(np.int32),
        logp_BT=torch.nn.functional.pad(logp, (1, 0)).numpy(),
    )


if __name__ == "__main__":
    make()
