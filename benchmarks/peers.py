"""Other programs: generation by PyTorch (transformers) and by Google Tunix.

Both are optional. A generator takes prompts, a list of token id arrays, and a number of new
tokens, and returns the sampled ids [rows, new]: temperature 1, no truncation and no early stop.
Unlike this program, it returns no log-probabilities.
"""

import importlib
import os
import time
import warnings

import numpy as np

COMMANDS = {
    "torch": "pip install torch==2.13.0",
    "tunix": "pip install google-tunix==0.1.7",
}


class PeerMissing(Exception):
    """A peer that is not installed; the message names the command that installs it."""


def need(name):
    """Import and return the module of a peer.

    Raises:
      PeerMissing: the module, or one of its imports, is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerMissing(f"skipped: no {name} ({error}); {COMMANDS[name]}") from error


def torch_model(directory):
    """Load the model of a directory in Hugging Face format with transformers."""
    torch = need("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).eval()
    model.generation_config.eos_token_id = None  # no early stop
    return model


def choose_threads(run):
    """Let torch use one thread or all cores, whichever runs `run` faster; return its name.

    A tiny model's operations are too small for threads. If other programs use the cores, threads
    that wait for each other can take ten times as long.
    """
    torch = need("torch")
    seconds = {1: [], os.cpu_count(): []}
    for _ in range(6):
        for threads, found in seconds.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
    best = min(seconds, key=lambda threads: min(seconds[threads]))
    torch.set_num_threads(best)
    return f"torch, {best} thread" + "s" * (best > 1)


def torch_generator(directory):
    """Return generate(prompts, new_tokens) -> ids by transformers; every prompt is prefilled."""
    model = torch_model(directory)
    torch = need("torch")

    def generate(prompts, new_tokens):
        ids_BT, mask_BT = map(torch.from_numpy, pad_left(prompts))
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        found = found[:, ids_BT.shape[1] :].numpy()
        if found.shape[1] != new_tokens:
            raise RuntimeError(f"transformers stopped after {found.shape[1]} of {new_tokens}")
        return found

    return generate


def torch_batcher(directory, stop_ids, *, tokens, in_flight=16, page=16):
    """Return generate(prompts, new_tokens) -> [ids of each] by transformers' continuous batching.

    A reply ends at a stop id, and the next prompt takes its place. Common prefixes of prompts are
    read once, in whole pages. Two cores were fastest with 16 replies at a time.

    Args:
      tokens: total tokens of the prompts and replies in the cache at a time.
      in_flight: number of replies at a time.
    """
    model = torch_model(directory)
    model.set_attn_implementation("sdpa")  # other kernels of its paged cache need a GPU
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=-(-tokens // page),
        max_batch_tokens=1024,
        max_requests_per_batch=in_flight,
    )

    def generate(prompts, new_tokens):
        sampling = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(stop_ids) or None,
            pad_token_id=0,
        )
        found = model.generate_batch(
            [prompt.tolist() for prompt in prompts],
            generation_config=sampling,
            continuous_batching_config=pages,
        )
        if len(found) != len(prompts):
            raise RuntimeError(f"generate_batch answered {len(found)} of {len(prompts)} prompts")
        order = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
        return [found[name].generated_tokens for name in order]

    return generate


def torch_logits(directory, prompt):
    """Return the logits after a prompt, to check that the weights are the same."""
    model = torch_model(directory)
    torch = need("torch")
    with torch.inference_mode():
        return model(torch.from_numpy(np.asarray(prompt, np.int64)[None])).logits[0, -1].numpy()


def tunix_model(directory, config):
    """Return Tunix's Qwen2 with the weights of a directory.

    Args:
      config: the `qwen.ModelConfig` of the directory.
    """
    need("tunix")
    try:
        from tunix.models.qwen2.model import ModelConfig
        from tunix.models.qwen2.params import create_model_from_safe_tensors
    except ImportError as error:  # installed without its dependencies
        raise PeerMissing(f"skipped: tunix ({error}); {COMMANDS['tunix']}") from error
    return create_model_from_safe_tensors(
        str(directory),
        ModelConfig(
            num_layers=config.layers,
            vocab_size=config.vocab_size,
            embed_dim=config.width,
            hidden_dim=config.mlp_width,
            num_heads=config.heads,
            head_dim=config.head_dim,
            num_kv_heads=config.kv_heads,
            rope_theta=config.rope_theta,
            norm_eps=config.norm_eps,
            use_tied_embedding=config.tied,
        ),
    )


def tunix_generator(directory, config, *, prompt_width, new_tokens):
    """Return generate(prompts, new_tokens) -> ids by Tunix's sampler.

    Args:
      prompt_width: padded length of prompts, the same as in this program.
    """
    model = tunix_model(directory, config)
    from tunix.generate.sampler import CacheConfig, Sampler

    sampler = Sampler(
        model,
        _Ids(config.vocab_size),
        CacheConfig(
            cache_size=prompt_width + new_tokens,
            num_layers=config.layers,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
        ),
    )
    seeds = iter(range(1 << 30))

    def generate(prompts, new_tokens):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = sampler(
                list(prompts),
                max_generation_steps=new_tokens,
                max_prompt_length=prompt_width,
                temperature=1.0,
                top_p=1.0,
                seed=next(seeds),
                eos_tokens=[config.vocab_size],  # no early stop
            )
        return np.stack(found.tokens)

    return generate


def tunix_logits(directory, config, prompt):
    """Return the logits after a prompt, to check that the weights are the same."""
    length = len(prompt)
    mask_1TT = np.tril(np.ones((1, length, length), bool))
    found, _ = tunix_model(directory, config)(
        np.asarray(prompt)[None], np.arange(length)[None], None, mask_1TT
    )
    return np.asarray(found[0, -1])


class _Ids:
    """A tokenizer whose texts are token ids: neither side encodes or decodes text."""

    def __init__(self, pad):
        self.pad = pad

    def encode(self, ids):
        return list(ids)

    def decode(self, ids):
        return ""

    def bos_id(self):
        return None

    def eos_id(self):
        return self.pad

    def pad_id(self):
        return self.pad


def pad_left(prompts):
    """Return (ids int64 [rows, width], mask) of left-padded prompts, for generation in torch."""
    width = max(map(len, prompts))
    ids_BT = np.zeros((len(prompts), width), np.int64)
    mask_BT = np.zeros_like(ids_BT)
    for ids_T, mask_T, prompt in zip(ids_BT, mask_BT, prompts, strict=True):
        ids_T[width - len(prompt) :] = prompt
        mask_T[width - len(prompt) :] = 1
    return ids_BT, mask_BT
