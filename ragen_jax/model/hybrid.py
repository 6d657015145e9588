"""The layers of a model in which some have linear attention, and the others full attention.

Layers of the two kinds have different parameters. Each parameter is stacked over the layers that
have it (`ModelConfig.layers_with`), in their order. The layers run as a scan over their shortest
repeating pattern: three linear-attention layers and a full one, say.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.types import Params
from ragen_jax.model.delta_rule import LinearBlock
from ragen_jax.model.shape import ModelConfig

Kept = tuple[Any, Any, Any]  # keys, values and states, in the form of `segments.Segment`
# (parameters, x, keys and values of each segment) -> (x, keys and values of the new tokens)
FullLayer = Callable[[Params, jax.Array, tuple[Any, ...]], tuple[jax.Array, Any]]


def init_layers(config: ModelConfig, full_block: nn.Module, x: Any, key: jax.Array) -> Params:
    """Return new parameters of all layers, whose axes are named.

    Args:
      full_block: a `qwen.Block`.
      x: input of a layer.
    """
    empty = jnp.zeros(x.shape, x.dtype)
    angles = jnp.ones((1, 1, 1, (config.rotary_dim or config.head_dim) // 2))
    calls = {
        "linear": (LinearBlock(config, parent=None), (empty, None, None)),
        "full": (full_block, (empty, ((angles, angles),), (), False, None, None, ())),
    }
    layers: list[int] = []
    of_kinds: list[Params] = []
    for kind, (block, args) in calls.items():
        numbers = [i for i, layer in enumerate(config.kinds) if layer.attention == kind]
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.array(numbers))
        init: Any = functools.partial(lambda block, args, key: block.init(key, *args), block, args)
        of_kinds.append(jax.vmap(init)(keys)["params"])
        layers += numbers
    order = np.argsort(layers)

    def stack(*kinds):
        value = kinds[0].value
        if len(kinds) > 1:
            value = jnp.concatenate([x.value for x in kinds])[order]
        return kinds[0].replace(value=value).add_axis(0, {nn.PARTITION_NAME: "layers"})

    def boxed(x):
        return isinstance(x, nn.Partitioned)

    names = dict.fromkeys(name for params in of_kinds for name in params)
    return {
        name: jax.tree.map(stack, *(x[name] for x in of_kinds if name in x), is_leaf=boxed)
        for name in names
    }


def pattern(config: ModelConfig) -> int:
    """Return the length of the shortest pattern of kinds that repeats to all layers."""
    kinds = [layer.attention for layer in config.kinds]
    for length in range(1, len(kinds)):
        if len(kinds) % length == 0 and kinds == kinds[:length] * (len(kinds) // length):
            return length
    return len(kinds)


def is_unrolled(config: ModelConfig, most: int) -> bool:
    """Return whether the layers run one by one: there are at most `most`, or no pattern repeats."""
    return config.layers <= most or pattern(config) == config.layers


def run_layers(
    config: ModelConfig,
    params: Params,
    x: jax.Array,
    full: FullLayer,
    segments: Sequence[tuple[Any, Any]],
    state: Any,
    count_B: jax.Array | None,
    *,
    keep: bool,
    unrolled: bool,
) -> tuple[jax.Array, Kept | None]:
    """Run all layers; return (x, what they keep, or None without `keep`).

    Args:
      params: of the layers.
      segments: (keys, values) of the full layers, as in `segments.Segment`.
      state: `delta_rule.States` after the segments; None: no token came before.
      count_B: as in `LinearBlock`.
      unrolled: whether the layers run one by one.
    """
    block = LinearBlock(config, parent=None)

    def call_linear(params, x, state, count_B):
        return block.apply({"params": params}, x, state, count_B)

    linear: Any = call_linear
    if config.remat:
        linear = jax.checkpoint(call_linear, prevent_cse=False)

    def run(x, length, params, segments, state):
        """Run the first `length` layers, given the stacks of these layers alone."""
        kvs, states = [], []
        for i in range(length):
            layer = {}
            for name, stack in params.items():
                having = config.layers_with(name)
                if i in having:
                    layer[name] = _at(stack, having.index(i))
            if config.kinds[i].attention == "linear":
                before = None if state is None else _at(state, len(states))
                x, after = linear(layer, x, before, count_B)
                states.append(after)
            else:
                memory = tuple((_at(k, len(kvs)), _at(v, len(kvs))) for k, v in segments)
                x, kv = full(layer, x, memory)
                kvs.append(kv)
        return x, ((kvs, states) if keep else None)

    if unrolled:
        x, kept = run(x, config.layers, params, segments, state)
        if kept is None:
            return x, None
        k, v = zip(*kept[0], strict=True)
        return x, (k, v, tuple(kept[1]))
    length = pattern(config)

    def split(stack):
        """Return the stack as one of patterns of layers."""
        periods = config.layers // length
        return jax.tree.map(lambda a: a.reshape(periods, -1, *a.shape[1:]), stack)

    def body(x, parts):
        return run(x, length, *parts)

    x, kept = jax.lax.scan(body, x, split((params, tuple(segments), state)))
    if kept is None:
        return x, None

    def join(layers):
        """Return the stack of all layers from those of each place in the pattern."""
        return jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *layers)

    (k, v), state = join(kept[0]), join(kept[1])
    return x, (k, v, state)


def _at(stack: Any, index: int) -> Any:
    """Return a layer's entry of a stack, or of a tuple of layers."""
    if type(stack) is tuple:
        return stack[index]
    return jax.tree.map(lambda a: a[index], stack)
