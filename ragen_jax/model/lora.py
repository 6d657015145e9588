"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) as a transform of parameters.

An adapted projection with kernel W computes x W + scale (x A) B, where scale = alpha / rank,
only A [I, r] and B [r, outputs] are trained, and B starts at 0. Adapters are a separate tree,
shaped like the model's parameters:

    {"layers": {"q": {"lora_a": [L, I, r], "lora_b": [L, r, *outputs]}, ...}}

In a mixture of experts, gate, up and down of every expert have adapters, lora_a [L, E, I, r] and
lora_b [L, E, r, outputs]; its router has none, so that experts are chosen as in the base model.

`attach` puts them next to the kernels, where `modules.Linear` finds them; `merge` adds them into
the kernels. The base parameters are never copied by `attach`, and a gradient with respect to the
adapters never forms a matrix of a kernel's size.

Adapters of a vision tower are a tree of the same form under the key "tower", next to "layers".
`attach` and `merge` accept it together with the tower's parameters, like the tree of a model.

Axes: L layers, E experts, I inputs of a projection (its input axes flattened), r rank.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from safetensors import SafetensorError, safe_open

from ragen_jax.core.sharding import has_other_devices, send, within_processes
from ragen_jax.core.types import Params
from ragen_jax.model import hf, qwen, weights
from ragen_jax.model.families import decoder, family_of, name_in_memory, qwen3_5
from ragen_jax.model.families.types import SPLIT
from ragen_jax.model.layout import param_shardings
from ragen_jax.model.vision import tensors as vision_tensors

# Our name of a projection -> (its module in a file, layout of its kernel).
PROJECTIONS = {
    path[1]: (name.removesuffix(".weight"), layout)
    for path, (name, layout) in {**decoder.TENSORS, **qwen3_5.LARGE}.items()
    if path[-1] == "kernel"
}
ALL_TARGETS = tuple(PROJECTIONS)
# q, k, v, o, gate, up, down: those of models without linear attention.
TARGETS = tuple(name for name in ALL_TARGETS if not name.startswith("delta_"))
EXPERTS = "experts"  # the module that has gate, up and down, of all experts, in a mixture
OF_EXPERTS = ("gate", "up", "down")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # PEFT wraps the model twice
TOWER_MODULES = r".*visual\..*"  # regular expression for the names of the tower's modules
LEAVES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}

# Fields of PEFT's LoraConfig that are read below, or that cannot change the result of given
# tensors. Any other field that is set changes the product or the ranks, and is refused.
READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "init_lora_weights"}
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "layers_pattern", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "task_type", "velora_config"),
}
# Initialisations that do not change the base model's weights.
INITIALISED = (True, False, "gaussian", "eva", "orthogonal")


def init_adapters(
    config: qwen.ModelConfig,
    key: jax.Array,
    *,
    rank: int,
    targets: Iterable[str],
    tower: bool = False,
) -> Params:
    """Return new adapters, which do not change the model's output: lora_b is 0.

    lora_a is normal with the variance of PEFT's default, a uniform distribution of half-width
    I**-0.5. A target's draw does not depend on the other targets.

    Args:
      rank: at least 1.
      targets: names from `ALL_TARGETS`.
      tower: whether to add adapters of the model's vision tower, for the same targets.

    Returns:
      Adapters (see the module), float32.

    Raises:
      ValueError: an unknown target, no target, a target that no layer has, a rank below 1, or a
        model without a tower.
    """
    _check_rank(rank)
    targets = check_targets(targets)
    check_layers(config, targets)

    def draw(kernels, first):
        layers = {}
        for target in targets:
            shape = _leaf_shapes(target, kernels[target], rank)
            target_key = jax.random.fold_in(key, first + ALL_TARGETS.index(target))
            deviation = (3 * shape["lora_a"][-2]) ** -0.5
            layers[target] = {
                "lora_a": deviation * jax.random.normal(target_key, shape["lora_a"], jnp.float32),
                "lora_b": jnp.zeros(shape["lora_b"], jnp.float32),
            }
        return {"layers": layers}

    adapters = draw(_kernels(config), 0)
    if tower:
        adapters["tower"] = draw(_tower_kernels(config), len(TARGETS))
    return adapters


def attach(params: Params, adapters: Params, *, scale: ArrayLike) -> Params:
    """Return the parameters with adapters next to their kernels, a form that `qwen.Qwen` accepts.

    Pure, traceable and differentiable. Outside jit the result shares the arrays of `params`.
    Functions that copy parameters (`hf.save`, `layout.sampling_params`) take only the base: attach
    adapters afterwards.

    Args:
      params: parameters of a `qwen.Qwen`, without adapters.
      adapters: see the module.
      scale: scalar, alpha / rank; lora_b is multiplied by it.

    Returns:
      The parameters. Adapters of a tower are under the key "tower", with their scale;
      image_table.py applies them to the tower's parameters.

    Raises:
      ValueError: an unknown target, shapes that do not fit, or params that have adapters.
    """
    layers = dict(params["layers"])
    for target, pair in _pairs(params, adapters):
        scaled = {"lora_a": pair["lora_a"], "lora_b": scale * pair["lora_b"]}
        if target in layers:
            layers[target] = {**layers[target], **scaled}
        else:
            own = {f"{target}_{leaf}": x for leaf, x in scaled.items()}
            layers[EXPERTS] = {**layers[EXPERTS], **own}
    tower = {"tower": {**adapters["tower"], "scale": scale}} if "tower" in adapters else {}
    return {**params, **tower, "layers": layers}


def merge(params: Params, adapters: Params, *, scale: ArrayLike) -> Params:
    """Return plain parameters with kernels W + scale A B, in the kernels' dtype.

    Arguments and errors are those of `attach`; adapters of a tower are merged separately. Outside
    jit the other leaves are shared with `params`.
    """
    layers = dict(params["layers"])
    for target, pair in _pairs(params, adapters):
        (module, leaf), a, b = _place(target, layers), pair["lora_a"], pair["lora_b"]
        kernel = layers[module][leaf]
        flat = b.reshape(*a.shape[:-2], a.shape[-1], -1)
        product = jnp.matmul(a, flat, precision=jax.lax.Precision.HIGHEST).reshape(kernel.shape)
        merged = (kernel + scale * product).astype(kernel.dtype)
        layers[module] = {**layers[module], leaf: merged}
    return {**params, "layers": layers}


def adapter_shardings(config: qwen.ModelConfig, adapters: Params, mesh: Mesh) -> Params:
    """Return a NamedSharding for every adapter, derived from its kernel's (layout.py).

    lora_a is split along its inputs and lora_b along its outputs, like the kernel; the rank is not
    split. Adapters of a tower are replicated on every device.

    Args:
      adapters: see the module; only its keys are read.

    Raises:
      ValueError: an unknown target.
    """
    kernels = param_shardings(qwen.Qwen(config), mesh)["layers"]
    layers = {}
    for target in check_targets(adapters["layers"]):
        module, leaf = _place(target, kernels)
        kernel = tuple(kernels[module][leaf].spec)
        split, stacked = _first_output(target, kernel), _stacked(target, kernel)
        # Several input axes are flattened into one, so splitting the first splits that axis.
        lora_a = PartitionSpec(*kernel[: stacked + 1], None)
        lora_b = PartitionSpec(*kernel[:stacked], None, *kernel[split:])
        layers[target] = {
            "lora_a": NamedSharding(mesh, lora_a),
            "lora_b": NamedSharding(mesh, lora_b),
        }
    if "tower" not in adapters:
        return {"layers": layers}
    every = NamedSharding(mesh, PartitionSpec())
    pairs = {target: dict.fromkeys(LEAVES, every) for target in adapters["tower"]["layers"]}
    return {"layers": layers, "tower": {"layers": pairs}}


def place_adapters(adapters: Params, model: qwen.Qwen, mesh: Mesh) -> Params:
    """Place the adapters on the mesh according to `adapter_shardings`."""
    here = getattr(jax.tree.leaves(adapters)[0].sharding, "mesh", mesh)
    targets = tuple(adapters["layers"]), tuple(adapters.get("tower", {"layers": {}})["layers"])
    if not has_other_devices(here, mesh):
        return _placing(model, *targets, mesh)(adapters)
    shardings = adapter_shardings(model.config, adapters, mesh)
    if jax.process_count() > 1:
        within = within_processes(here)
        with jax.set_mesh(within):
            staged = _placing(model, *targets, within)(adapters)
        return send(staged, shardings)
    return jax.device_put(adapters, shardings)


@functools.cache
def _placing(
    model: qwen.Qwen, targets: tuple[str, ...], of_tower: tuple[str, ...], mesh: Mesh
) -> Callable[[Params], Params]:
    keys: Params = {"layers": dict.fromkeys(targets)}
    if of_tower:
        keys["tower"] = {"layers": dict.fromkeys(of_tower)}
    shardings = adapter_shardings(model.config, keys, mesh)
    return jax.jit(lambda adapters: adapters, out_shardings=shardings)


def save_adapter(
    path: str | Path,
    adapters: Params,
    *,
    config: qwen.ModelConfig,
    rank: int,
    alpha: float,
    targets: Iterable[str],
    base_model: str | Path,
) -> None:
    """Write a directory that `load_adapter` and PEFT's `PeftModel.from_pretrained` open.

    The files are written next to `path` and renamed at the end, as in `hf.save`; an earlier save
    at `path` is replaced.

    Args:
      path: directory to write; its parents are created.
      adapters: see the module docstring; on any devices; lora_b without the scale. If they are
        spread over several processes, every process must call this; only process 0 writes.
      config: config of the base model.
      rank, alpha, targets: the values used in training; scale = alpha / rank.
      base_model: directory or hub id of the base model, written for readers of the adapter.

    Raises:
      ValueError: the adapters do not fit this config, rank and targets, they include a tower's, or
        `path` holds files that would be lost.
    """
    _check_rank(rank)
    if "tower" in adapters:
        raise ValueError(
            "PEFT's format cannot hold adapters of a vision tower, whose queries, keys and "
            "values share an adapter; merge them and save the model"
        )
    targets = check_targets(targets)
    if set(targets) != set(adapters["layers"]):
        raise ValueError(
            f"adapters have the targets {', '.join(check_targets(adapters['layers']))}; "
            f"expected {', '.join(targets)}"
        )
    tensors = {}
    for target in targets:
        kernel = _kernels(config)[target]
        for leaf, shape in _leaf_shapes(target, kernel, rank).items():
            x = adapters["layers"][target][leaf]
            if x.shape != shape:
                raise ValueError(
                    f"adapter {target}/{leaf} has shape {x.shape}; rank {rank} needs {shape}"
                )
            stacked = _stacked(target, kernel)
            out = weights.tensor_shape(SPLIT, shape[stacked:])
            parts = (
                part for layer in weights.on_host(x) for part in layer.reshape(-1, *shape[stacked:])
            )
            for name, part in zip(_names(config, target, leaf), parts, strict=True):
                name = PREFIX + name_in_memory(name.removeprefix(PREFIX), config)
                tensors[name] = weights.to_tensor(part, name, SPLIT, out, "float32")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else float(alpha),
        "target_modules": [_module(target) for target in targets],
        # Modules of the model's vision tower share some of these names.
        **({} if config.vision is None else {"exclude_modules": TOWER_MODULES}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    if jax.process_index():
        return
    with hf.replacement(path) as fresh:
        hf.write_json(fresh / CONFIG, description)
        weights.write_tensors(fresh / WEIGHTS, tensors)


def is_adapter(path: str | Path) -> bool:
    """Return whether a directory holds an adapter in PEFT's format and no model."""
    directory = Path(path).expanduser()
    return (directory / CONFIG).exists() and not (directory / "config.json").exists()


def base_model(path: str | Path) -> str:
    """Return the directory or hub id of the model that an adapter belongs to.

    Raises:
      ValueError: its adapter_config.json names none.
    """
    file = Path(path).expanduser() / CONFIG
    name = hf.read_json(file).get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise ValueError(f"{file}: field base_model_name_or_path is {name!r}; it must name a model")
    return name


def load_adapter(
    path: str | Path, config: qwen.ModelConfig
) -> tuple[Params, int, float, tuple[str, ...]]:
    """Open an adapter directory in PEFT's format.

    Args:
      path: directory with adapter_config.json and adapter_model.safetensors.
      config: config of the base model.

    Returns:
      (adapters: float32 on the default device, rank, alpha, targets in the order of `ALL_TARGETS`).

    Raises:
      ValueError: no such directory, an adapter other than plain LoRA on `ALL_TARGETS` (DoRA,
        rank-stabilised scale, trained biases or whole modules, ranks that differ, an
        initialisation that changed the base weights), or tensors that are missing, unexpected or
        do not match the model's shapes.
    """
    directory = Path(path).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).exists():
            raise ValueError(f"{path} has no {name}; an adapter needs {CONFIG} and {WEIGHTS}")
    rank, alpha, targets = _read_config(directory / CONFIG)
    check_layers(config, targets)
    kernels = _kernels(config)
    leaves = {
        (target, leaf): (_names(config, target, leaf), shape, _stacked(target, kernels[target]))
        for target in targets
        for leaf, shape in _leaf_shapes(target, kernels[target], rank).items()
    }
    want = {
        name: weights.tensor_shape(SPLIT, shape[stacked:])
        for names, shape, stacked in leaves.values()
        for name in names
    }
    file = directory / WEIGHTS
    try:
        weights.check_header(file)
        opened = safe_open(file, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    layers = {target: {} for target in targets}
    with opened:
        names = list(opened.keys())
        bare = {
            name.removeprefix(PREFIX): weights.Renamed(opened, name)
            for name in names
            if name.startswith(PREFIX)
        }
        bare = weights.by_published_names(bare, config)
        tensors = {PREFIX + name: found for name, found in bare.items()}
        tensors |= {name: opened for name in names if not name.startswith(PREFIX)}
        _check_tensors(file, tensors, want, rank)
        for (target, leaf), (names, shape, stacked) in leaves.items():
            x = weights.read_part(tensors, names, SPLIT, shape, stacked=stacked)
            layers[target][leaf] = jnp.array(x, copy=True)  # an update may donate its state
    return {"layers": layers}, rank, alpha, targets


def _read_config(file: Path) -> tuple[int, float, tuple[str, ...]]:
    """Read (rank, alpha, targets) from an adapter_config.json."""
    c = hf.read_json(file)
    for name, accepted in (
        ("peft_type", ("LORA",)),
        ("bias", ("none",)),
        ("init_lora_weights", INITIALISED),
    ):
        if c.get(name, accepted[0]) not in accepted:
            shown = ", ".join(repr(x) for x in accepted)
            raise ValueError(f"{file}: {name} {c[name]!r} is not supported; accepted: {shown}")
    for name, value in c.items():
        if name not in READ | HARMLESS and value:
            raise ValueError(f"{file}: {name} {value!r} is not supported; it must not be set")
    missing = [name for name in ("r", "lora_alpha", "target_modules") if c.get(name) is None]
    if missing:
        raise ValueError(f"{file}: field {', '.join(missing)} is missing")
    ours = {_module(target): target for target in ALL_TARGETS}
    modules = c["target_modules"]
    unknown = [modules] if isinstance(modules, str) else sorted(set(modules) - ours.keys())
    if unknown or not modules:
        raise ValueError(
            f"{file}: target_modules {', '.join(unknown) or 'is empty'}; "
            f"accepted: a list of {', '.join(ours)}"
        )
    _check_rank(c["r"])
    return c["r"], c["lora_alpha"], check_targets(ours[module] for module in modules)


def _check_tensors(
    file: Path, tensors: weights.Tensors, want: Mapping[str, tuple[int, ...]], rank: int
) -> None:
    """Raise ValueError unless the file holds exactly the tensors and shapes of `want`."""
    missing, unexpected = want.keys() - tensors.keys(), tensors.keys() - want.keys()
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            some = ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ValueError(f"{file}: {len(names)} {problem} tensors: {some}")
    for name, shape in want.items():
        piece = tensors[name].get_slice(name)
        stored_shape = tuple(piece.get_shape())
        if stored_shape != shape:
            raise ValueError(
                f"{file}: tensor {name} has shape {stored_shape}; the model and rank {rank} "
                f"need {shape}"
            )
        if piece.get_dtype() not in weights.DISK_DTYPES.values():
            raise ValueError(
                f"{file}: tensor {name} is {piece.get_dtype()}; "
                f"accepted: {', '.join(weights.DISK_DTYPES.values())}"
            )


@functools.cache
def _kernels(config: qwen.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return {target: shape of its kernel, [L, *inputs, *outputs] or of experts} of a model."""
    shapes = {leaf.path: leaf.shape for leaf in weights.plan(config)}
    modules = {path[1] for path in shapes if path[0] == "layers"}
    paths = {target: ("layers", *_place(target, modules)) for target in ALL_TARGETS}
    return {target: shapes[path] for target, path in paths.items() if path in shapes}


@functools.cache
def _tower_kernels(config: qwen.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the same as `_kernels` for the model's vision tower.

    Raises:
      ValueError: the model has no tower.
    """
    if config.vision is None:
        raise ValueError(f"a model of family {config.family!r} has no vision tower to adapt")
    shapes = {leaf.path: leaf.shape for leaf in vision_tensors.plan(config.vision)}
    return {target: shapes["layers", target, "kernel"] for target in TARGETS}


def _place(target: str, modules: Container[str]) -> tuple[str, str]:
    """Return the (module, leaf) of a target's kernel in a layer with these modules."""
    return (target, "kernel") if target in modules else (EXPERTS, target)


def _stacked(target: str, kernel: tuple[object, ...]) -> int:
    """Return the number of leading axes, layers or layers and experts, of a target's kernel.

    Args:
      kernel: its shape, or its split over a mesh.
    """
    return 2 if target in OF_EXPERTS and len(kernel) == 4 else 1


def _first_output(target: str, kernel: tuple[object, ...]) -> int:
    """Return the index of the first output axis of a kernel; arguments as in `_stacked`."""
    inputs = _stacked(target, kernel)
    return inputs + 1 if PROJECTIONS[target][1] == SPLIT else len(kernel) - 1


def _leaf_shapes(target: str, kernel: tuple[int, ...], rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a target's leaves, given its kernel's shape."""
    split, stacked = _first_output(target, kernel), _stacked(target, kernel)
    return {
        "lora_a": (*kernel[:stacked], math.prod(kernel[stacked:split]), rank),
        "lora_b": (*kernel[:stacked], rank, *kernel[split:]),
    }


def _pairs(params: Params, adapters: Params) -> list[tuple[str, dict[str, jax.Array]]]:
    """Return [(target, {lora_a, lora_b})], checked against the kernels."""
    pairs = []
    for target in check_targets(adapters["layers"]):
        layers, pair = params["layers"], adapters["layers"][target]
        module, leaf = _place(target, layers)
        if ("lora_a" if module == target else f"{target}_lora_a") in layers[module]:
            raise ValueError(f"the parameters of {target} already have adapters")
        kernel, rank = layers[module][leaf].shape, pair["lora_a"].shape[-1]
        for leaf, shape in _leaf_shapes(target, kernel, rank).items():
            if pair[leaf].shape != shape:
                raise ValueError(
                    f"adapter {target}/{leaf} has shape {pair[leaf].shape}; kernel {kernel} "
                    f"and rank {rank} need {shape}"
                )
        pairs.append((target, pair))
    return pairs


def _names(config: qwen.ModelConfig, target: str, leaf: str) -> list[str]:
    """Return the tensor names of a leaf's layers, with the prefix used in published files.

    Each expert has its tensors, named like the modules of published files; layer by layer.
    """
    kernel = _kernels(config)[target]
    name = f"{PREFIX}{PROJECTIONS[target][0]}.{LEAVES[leaf]}"
    if _stacked(target, kernel) == 1:
        return [name.format(layer) for layer in config.layers_with(target)]
    of_expert = family_of(config).tensors["layers", EXPERTS, target][0].removesuffix(".weight")
    name = f"{PREFIX}{of_expert}.{LEAVES[leaf]}"
    return [name.format(*index) for index in np.ndindex(kernel[:2])]


def _module(target: str) -> str:
    """Return PEFT's name of a target: q_proj for q."""
    return PROJECTIONS[target][0].rpartition(".")[2]


def check_targets(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets in the order of `ALL_TARGETS`."""
    targets = list(targets)
    unknown = [name for name in targets if name not in ALL_TARGETS]
    if unknown or not targets:
        what = f"unknown targets {', '.join(map(str, unknown))}" if unknown else "no targets"
        raise ValueError(f"{what}; accepted: {', '.join(ALL_TARGETS)}")
    return tuple(name for name in ALL_TARGETS if name in targets)


def check_layers(config: qwen.ModelConfig, targets: Iterable[str]) -> None:
    """Refuse targets that no layer of the model has.

    Raises:
      ValueError: such a target.
    """
    kernels = _kernels(config)
    missing = [name for name in targets if name not in kernels]
    if missing:
        raise ValueError(
            f"no layer has the targets {', '.join(missing)}; accepted: {', '.join(kernels)} "
            "(model.lora.targets)"
        )


def _check_rank(rank: object) -> None:
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank {rank!r} is not an integer of at least 1")
