"""Model directories in Hugging Face format: config.json, safetensors weights, tokenizer files.

One table, `TENSORS`, names every tensor for both directions. The file holds a matrix as
[outputs, inputs] with the heads flattened and one tensor a layer; our parameters hold
[inputs, outputs] with the heads as an axis and the layers stacked (see qwen.py).

Axes: L layers, D width, H heads.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ragen_jax.model import qwen

ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2"}  # name in config.json -> its model_type
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NEEDED = f"config.json, {WEIGHTS} (or {INDEX} and its shards), tokenizer.json"
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.jinja")
DISK_DTYPES = ("F32", "BF16", "F16", "F64")
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")

# How a tensor in the file is laid out, given the shape of one layer's parameter.
SAME = "same"  # the parameter itself
FLAT = "flat"  # all axes in one
SPLIT = "split"  # matrix [outputs, D] for a kernel [D, *outputs]
JOIN = "join"  # matrix [D, inputs] for a kernel [*inputs, D]

# Path of a parameter -> (tensor name, layout); "{}" is the layer's number.
TENSORS = {
    ("embed",): ("model.embed_tokens.weight", SAME),
    ("head",): ("lm_head.weight", SAME),
    ("final_norm", "scale"): ("model.norm.weight", SAME),
    **{
        ("layers", *path): (f"model.layers.{{}}.{name}", layout)
        for path, name, layout in (
            (("attention_norm", "scale"), "input_layernorm.weight", SAME),
            (("q", "kernel"), "self_attn.q_proj.weight", SPLIT),
            (("q", "bias"), "self_attn.q_proj.bias", FLAT),
            (("k", "kernel"), "self_attn.k_proj.weight", SPLIT),
            (("k", "bias"), "self_attn.k_proj.bias", FLAT),
            (("v", "kernel"), "self_attn.v_proj.weight", SPLIT),
            (("v", "bias"), "self_attn.v_proj.bias", FLAT),
            (("o", "kernel"), "self_attn.o_proj.weight", JOIN),
            (("mlp_norm", "scale"), "post_attention_layernorm.weight", SAME),
            (("gate", "kernel"), "mlp.gate_proj.weight", SPLIT),
            (("up", "kernel"), "mlp.up_proj.weight", SPLIT),
            (("down", "kernel"), "mlp.down_proj.weight", JOIN),
        )
    },
}


def load(path, *, mesh=None, dtype=None):
    """Opens a model directory or a model of the Hugging Face hub.

    Args:
      path: a directory, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
      mesh: `jax.sharding.Mesh` to put the parameters on; None: the default device.
      dtype: of activations and matrix products, as a name or a dtype; None: float32.

    Returns:
      (`qwen.Qwen`, params: nested dict of float32 arrays, tokenizer).

    Raises:
      ValueError: the model is not there, not of an accepted architecture, its tensors are not
        the ones that its config.json promises, or its tokenizer has more ids than its embedding.
    """
    directory = resolve(path)
    model, params = load_weights(directory, mesh=mesh, dtype=dtype)
    tokenizer = load_tokenizer(directory)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {len(tokenizer)} ids, the embedding only "
            f"{model.config.vocab_size} rows (vocab_size)"
        )
    return model, params, tokenizer


def save(path, model, params, tokenizer):
    """Writes a model directory that `load` and transformers open; weights in float32.

    The files are written beside `path` and renamed at the end, so a killed save leaves no half
    directory. An earlier save at `path` is replaced.

    Args:
      path: directory to write; its parents are made.
      model: `qwen.Qwen`. params: its parameters, on any device. tokenizer: of transformers.

    Raises:
      ValueError: the parameters are not the model's, the model has no Qwen2 form (no QKV
        bias), or `path` holds files that a replacement would lose.
    """
    path = Path(path).expanduser().resolve()
    config = _config_json(model.config, tokenizer)
    tensors = _to_tensors(model.config, params)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.saving-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _write_json(fresh / "config.json", config)
        generation = {k: config[k] for k in ("eos_token_id", "pad_token_id") if k in config}
        _write_json(fresh / "generation_config.json", generation)
        tokenizer.save_pretrained(fresh)
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        # safetensors keeps its files to their owner; a model is as public as its config.json.
        (fresh / WEIGHTS).chmod((fresh / "config.json").stat().st_mode)
        _replace(path, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def resolve(path):
    """The directory of a model: `path` itself, or the local copy of a hub id (downloaded).

    Raises:
      ValueError: there is no such directory, or the id cannot be downloaded.
    """
    name = str(path)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ValueError(f"{name} is a file; a model is a directory with {NEEDED}")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise ValueError(f"no model directory {name}; it must hold {NEEDED}")

    import huggingface_hub  # here, because directories do without it
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        found = huggingface_hub.snapshot_download(name, allow_patterns=list(DOWNLOADED))
    except (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"no directory {name} here, and the model {name} could not be downloaded from the "
            f"Hugging Face hub ({reason}). Where there is a network, run "
            f"`hf download {name} --local-dir DIR`, copy DIR here and pass "
            f"--config.model.path=DIR"
        ) from error
    return Path(found)


def model_config(path):
    """`qwen.ModelConfig` of a model directory or hub id, from its config.json alone.

    Raises:
      ValueError: no config.json, another architecture, or a feature that qwen.py lacks.
    """
    file = resolve(path) / "config.json"
    c = _read_json(file)
    names = c.get("architectures") or []
    accepted = any(name in ARCHITECTURES for name in names)
    if not names:
        accepted = c.get("model_type") in ARCHITECTURES.values()
    if not accepted:
        name = ", ".join(names) or f"model_type {c.get('model_type')!r}"
        raise ValueError(f"{file}: architecture {name}; accepted: {', '.join(ARCHITECTURES)}")

    # transformers 5 writes rope_parameters; before, rope_theta and rope_scaling.
    rope = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type")
    layer_types = c.get("layer_types") or ()
    windowed = c.get("use_sliding_window") and c.get("sliding_window") is not None
    if not layer_types and windowed and c.get("max_window_layers", 28) < c["num_hidden_layers"]:
        layer_types = ("sliding_attention",)
    for name, value, known in (
        ("rope_type", rope_type or "default", ("default",)),
        ("hidden_act", c.get("hidden_act", "silu"), ("silu",)),
        *(("layer_types", kind, ("full_attention",)) for kind in layer_types),
        ("quantization_config", c.get("quantization_config"), (None,)),
    ):
        if value not in known:
            raise ValueError(f"{file}: {name} {value!r} is not supported; accepted: {known[0]!r}")

    # Defaults are those of transformers' Qwen2Config, for fields that older files leave out.
    try:
        heads = c["num_attention_heads"]
        return qwen.ModelConfig(
            vocab_size=c["vocab_size"],
            width=c["hidden_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            mlp_width=c["intermediate_size"],
            rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 1e4),
            norm_eps=float(c.get("rms_norm_eps", 1e-6)),
            tied=bool(c.get("tie_word_embeddings", False)),
            max_positions=c.get("max_position_embeddings", 32768),
        )
    except KeyError as error:
        raise ValueError(f"{file}: field {error} is missing") from error


def stop_ids(path):
    """Ids that end a reply of a model directory or hub id, by its generation_config.json.

    Returns:
      tuple of int; empty without the file or its eos_token_id.
    """
    file = resolve(path) / "generation_config.json"
    ids = _read_json(file).get("eos_token_id") if file.exists() else None
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def load_tokenizer(directory):
    """The tokenizer of a model directory.

    Raises:
      ValueError: the directory has no tokenizer files.
    """
    directory = Path(directory)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer builds Qwen's own pipeline for every qwen2 directory, whatever its
    # tokenizer.json says: a tokenizer without NFC normalisation would come back with it.
    if (directory / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    if (directory / "vocab.json").exists() and (directory / "merges.txt").exists():
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    raise ValueError(f"{directory} has neither tokenizer.json nor vocab.json and merges.txt")


def load_weights(directory, *, mesh=None, dtype=None):
    """(model, params) of a model directory; see `load`. Shapes are checked before data is read."""
    directory = Path(directory)
    config = model_config(directory)
    try:
        compute = "float32" if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        compute = str(dtype)
    if compute not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {compute!r}; accepted: {', '.join(COMPUTE_DTYPES)}")
    model = qwen.Qwen(dataclasses.replace(config, dtype=compute))

    # With a mesh the arrays stay on the host until they are cut; else each goes to the device
    # (copied, because the update donates its state) before the next is read.
    put = np.asarray if mesh is not None else functools.partial(jnp.array, copy=True)
    with _open_weights(directory) as tensors:
        _check_tensors(directory, config, tensors)
        params = unflatten_dict(
            {
                path: put(_read_leaf(tensors, names, layout, shape))
                for path, names, layout, shape in _plan(config)
            }
        )
    if mesh is not None:
        from ragen_jax.sharding import shard_params

        params = shard_params(params, model, mesh)
    return model, params


@functools.cache
def _plan(config):
    """[(path, tensor names, layout, leaf shape)] of every parameter.

    A stacked leaf has one name a layer; the shape is the whole leaf's.
    """
    abstract = jax.eval_shape(functools.partial(qwen.init_params, config), jax.random.key(0))
    plan = []
    for path, leaf in flatten_dict(abstract).items():
        name, layout = TENSORS[path]
        names = [name.format(i) for i in range(config.layers)] if path[0] == "layers" else [name]
        plan.append((path, names, layout, leaf.shape))
    return plan


def _layer_shape(names, shape):
    """Shape of what one tensor of a leaf holds: without the layer axis of a stacked leaf."""
    return shape[1:] if ".layers." in names[0] else shape


def _tensor_shape(layout, shape):
    """Shape in the file of a parameter (one layer's) of shape `shape`."""
    if layout == SPLIT:
        return (math.prod(shape[1:]), shape[0])
    if layout == JOIN:
        return (shape[-1], math.prod(shape[:-1]))
    return (math.prod(shape),) if layout == FLAT else tuple(shape)


@contextlib.contextmanager
def _open_weights(directory):
    """Dict of tensor name -> open safetensors file that holds it."""
    single, index = directory / WEIGHTS, directory / INDEX
    if single.exists():
        files = [single]
    elif index.exists():
        files = [directory / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    else:
        raise ValueError(f"{directory} has neither {WEIGHTS} nor {INDEX}")
    with contextlib.ExitStack() as stack:
        tensors = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read {file}: {error}") from error
            tensors |= dict.fromkeys(opened.keys(), opened)
        yield tensors


def _check_tensors(directory, config, tensors):
    """Raises ValueError unless the files hold exactly the model's tensors, in its shapes."""
    want = {
        name: _tensor_shape(layout, _layer_shape(names, shape))
        for _, names, layout, shape in _plan(config)
        for name in names
    }
    # Some trainers write the head although it is tied; it may stay if it says the same.
    embed, head = (TENSORS[(name,)][0] for name in ("embed", "head"))
    extra = tensors.keys() - want.keys()
    if config.tied and head in extra and embed in tensors:
        pair = (tensors[name].get_tensor(name) for name in (embed, head))
        if not np.array_equal(*pair):
            raise ValueError(f"{directory}: {head} differs from {embed}, to which it is tied")
        extra.remove(head)
    for problem, names in (("missing", want.keys() - tensors.keys()), ("unexpected", extra)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{directory}: {len(names)} {problem} tensors: {some}")
    for name, shape in want.items():
        piece = tensors[name].get_slice(name)
        found = tuple(piece.get_shape())
        if found != shape:
            raise ValueError(
                f"{directory}: tensor {name} has shape {found}, config.json asks for {shape}"
            )
        if piece.get_dtype() not in DISK_DTYPES:
            raise ValueError(
                f"{directory}: tensor {name} is {piece.get_dtype()}; "
                f"accepted: {', '.join(DISK_DTYPES)}"
            )


def _read_leaf(tensors, names, layout, shape):
    """One parameter as a float32 NumPy array of shape `shape`, its layers stacked."""
    leaf = np.empty(shape, np.float32)
    one = _layer_shape(names, shape)
    for into, name in zip(leaf.reshape(len(names), *one), names, strict=True):
        tensor = tensors[name].get_tensor(name)
        into[...] = (tensor.T if layout in (SPLIT, JOIN) else tensor).reshape(one)
    return leaf


def _to_tensors(config, params):
    """Dict of tensor name -> float32 NumPy array, as the file holds them."""
    leaves = flatten_dict(params)
    plan = _plan(config)
    differ = leaves.keys() ^ {path for path, *_ in plan}
    if differ:
        names = ", ".join("/".join(path) for path in sorted(differ))
        raise ValueError(f"parameters missing or not the model's: {names}")
    tensors = {}
    for path, names, layout, shape in plan:
        leaf = np.asarray(jax.device_get(leaves[path]), np.float32)
        if leaf.shape != shape:
            raise ValueError(
                f"parameter {'/'.join(path)} has shape {leaf.shape}, the model's is {shape}"
            )
        one = _layer_shape(names, shape)
        out = _tensor_shape(layout, one)
        for name, x in zip(names, leaf.reshape(len(names), *one), strict=True):
            x = x.reshape(out[::-1]).T if layout in (SPLIT, JOIN) else x.reshape(out)
            tensors[name] = np.ascontiguousarray(x)
    return tensors


def _config_json(c, tokenizer):
    """Contents of config.json for a `qwen.ModelConfig`."""
    if not c.qkv_bias:
        raise ValueError("Qwen2ForCausalLM has QKV biases, this model has none (qkv_bias=False)")
    (architecture, model_type), *_ = ARCHITECTURES.items()
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,  # read by transformers 4, rope_parameters by 5
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "use_sliding_window": False,
        "use_cache": True,
        "dtype": "float32",
        "torch_dtype": "float32",
        **{name: value for name, value in ids.items() if value is not None},
    }


def _replace(path, fresh):
    """Renames `fresh` to `path`; what was there goes away only once its successor is in place."""
    if not path.exists():
        fresh.rename(path)
        return
    lost = sorted(set(os.listdir(path)) - set(os.listdir(fresh)))
    if lost:
        raise ValueError(f"{path} holds other files ({', '.join(lost[:4])}); save elsewhere")
    old = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    path.rename(old)
    fresh.rename(path)
    shutil.rmtree(old)


def _read_json(file):
    try:
        return json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"no {file}; a model directory must hold {NEEDED}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def _write_json(file, value):
    file.write_text(json.dumps(value, indent=2) + "\n")
