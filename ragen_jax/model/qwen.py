"""Qwen, Llama 3 and Gemma 3 in Flax: RMSNorm, rotary positions, grouped queries, a gated MLP.

Axes: B rows, T tokens, D width, H heads, K key-value heads, F MLP width, V vocabulary, L layers.
Parameters of the L layers are stacked on a leading axis; the layers run as one scan. What differs
between layers (shape.Layer) is selected by the index of a layer's kind, which the scan reads too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from ragen_jax.core.sharding import constrain
from ragen_jax.core.stored_programs import kept_as_json
from ragen_jax.core.types import Params
from ragen_jax.model import hybrid
from ragen_jax.model.attention import attend
from ragen_jax.model.experts import ExpertMLP, Routing
from ragen_jax.model.kernels import SCALED_QUERIES
from ragen_jax.model.modules import ACTIVATIONS, Linear, RMSNorm, gated_mlp, with_axes
from ragen_jax.model.page_kernel import unread_heads
from ragen_jax.model.quantised import dequantise, quantise
from ragen_jax.model.rotary import rotary_angles, rotate
from ragen_jax.model.segments import KV, PageOfLayers, Segment, is_page
from ragen_jax.model.shape import ModelConfig
from ragen_jax.model.tree_attention import Tree
from ragen_jax.model.vision.positions import splice, token_positions
from ragen_jax.model.window_cache import LayersByKind, places, tokens_held

# Models with at most this number of layers run them one after the other instead of as a scan: a
# scan's backward pass first copies every saved activation into an array stacked over layers, which
# on CPU costs the tiny agent as much as the layers do.
UNROLLED_LAYERS = 4

ALL_POSITIONS = 1 << 30  # the window of a layer that reads all positions


class Block(nn.Module):
    """A transformer layer, whose carry is x."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kind_angles: tuple[tuple[jax.Array, jax.Array], ...],
        segment_rows: tuple[tuple[jax.Array, ...], ...],
        keep_kv: bool,
        tree: Tree | None,
        kind: jax.Array | int | None,
        segment_kvs: tuple[tuple[KV, KV], ...],
        replay: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[tuple[KV, KV] | None, Routing | None]]:
        """Run the layer; return (x, (keys and values, each token's experts)).

        Args:
          kind_angles: result of `rotary_angles` for each of `ModelConfig.attention_kinds`.
          kind: index of the layer's kind among them; None: there is one.
          replay: as in `experts.route`, [B, T, k].
        """
        c = self.config
        norm = functools.partial(RMSNorm, c.norm_eps, c.norm_plus_one)
        angles = kind_angles[0]
        if isinstance(kind, int):
            angles = kind_angles[kind]
        elif kind is not None:
            angles = jax.tree.map(lambda *x: jax.lax.select_n(kind, *x), *kind_angles)
        D, H, K, hd, F = c.width, c.heads, c.kv_heads, c.head_dim, c.mlp_width

        def project(name, heads, axis):
            axes, gated = ("embed", axis, "head"), c.output_gate and name == "q"
            y = Linear((D, heads, hd * (1 + gated)), axes, bias=c.qkv_bias, name=name)(h)
            y = constrain(y, "rows", None, axis, None)
            if gated:
                y, gates[:] = y[..., :hd], [y[..., hd:]]
            normed = c.qk_norm and name in ("q", "k")
            return norm(name=f"{name}_norm")(y) if normed else y

        def finish(y, name):
            return norm(name=f"{name}_post_norm")(y) if c.post_norms else y

        gates: list[jax.Array] = []  # of attention's result
        h = norm(name="attention_norm")(x)
        scaled = c.attention in SCALED_QUERIES and not segment_kvs
        scale = hd**-0.5 if scaled else 1.0
        if c.score_dim:  # attention divides the scores by the root of head_dim
            scale *= (hd / c.score_dim) ** 0.5
        q = project("q", H, "heads")
        if c.rotary_dim:  # the angles do not reach all numbers of a head
            q = rotate(q * scale, angles)
        else:
            q = rotate(q, [scale * x for x in angles])
        k = rotate(project("k", K, "kv_heads"), angles)
        v = project("v", K, "kv_heads")
        rounded = None
        if c.cache_dtype == "int8":
            rounded = quantise(jnp.swapaxes(k, 1, 2)), quantise(jnp.swapaxes(v, 1, 2))
            k, v = (jnp.swapaxes(dequantise(x, c.dtype), 1, 2) for x in rounded)
        segments = [
            (kv, *lengths) if isinstance(kv, (PageOfLayers, LayersByKind)) else (*kv, *lengths)
            for kv, lengths in zip(segment_kvs, segment_rows, strict=True)
        ]
        a = _attend_as(c, kind, q, k, v, segments, tree)
        for gate in gates:
            a = a * jax.nn.sigmoid(gate)
        o = Linear((H, hd, D), ("heads", "head", "embed"), contract=2, name="o")(a)
        x = x + finish(o, "attention")
        x = constrain(x, "rows", None, None)

        h, routing = norm(name="mlp_norm")(x), None
        act = ACTIVATIONS[c.activation]
        if c.experts is not None:
            router = Linear((D, c.experts.count), ("embed", "router"), name="router")(h)
            form = c.expert_form
            if keep_kv and form == "blocks":
                # Sampling: a token's result must not depend on the number of rows read with it.
                form = "wide"
            mlp = ExpertMLP(c.experts, form, act, name="experts")
            down, routing = mlp(h, router, replay)
        else:
            down = gated_mlp(h, F, act)
        x = x + finish(down, "mlp")
        x = constrain(x, "rows", None, None)
        kv = None
        if keep_kv:
            kv = rounded or (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))  # [B, K, T, hd]
        return x, (kv, routing)


def _attend_as(
    config: ModelConfig,
    kind: jax.Array | int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Sequence[tuple[Any, ...]],
    tree: Tree | None,
) -> jax.Array:
    """Return attention of a layer of this kind; see `Block`."""
    attention = functools.partial(attend, q, k, v, segments, kernel=config.attention, tree=tree)
    kinds = config.attention_kinds
    windows = [config.window if name == "windowed" else None for name in kinds]
    if any(isinstance(segment[0], LayersByKind) for segment in segments):

        def attend_as(index):
            of_kind = [
                one[0].of_kind(kinds[index], *one[1:]) if isinstance(one[0], LayersByKind) else one
                for one in segments
            ]
            return attend(q, k, v, of_kind, window=windows[index])

        if kind is None:
            return attend_as(0)
        return jax.lax.switch(kind, [functools.partial(attend_as, i) for i in range(len(kinds))])
    if kind is None or isinstance(kind, int):
        return attention(window=windows[kind or 0])
    if config.attention == "xla" or segments:
        return attention(window=jnp.array([window or ALL_POSITIONS for window in windows])[kind])
    # A kernel is compiled for each window.
    return jax.lax.switch(kind, [functools.partial(attention, window=n) for n in windows])


# Inlined, so that programs that run the same layers round alike in bfloat16: as a function that is
# called, a layer would round otherwise in a gradient than in a forward pass.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def run_block(
    config: ModelConfig,
    keep_kv: bool,
    kind: int | None,
    params: Params,
    x: jax.Array,
    angles: Any,
    rows: Any,
    tree: Tree | None,
    memory: Any,
    replay: jax.Array | None,
) -> Any:
    """Run a layer outside of a scan; see `Block`. All layers of a kind share one trace."""
    block = _block_class(config)(config, parent=None)
    return block.apply({"params": params}, x, angles, rows, keep_kv, tree, kind, memory, replay)


def _block_class(config: ModelConfig) -> Any:
    return nn.remat(Block, prevent_cse=False, static_argnums=(4,)) if config.remat else Block


class Qwen(nn.Module):
    """tokens -> final hidden states (and, on request, keys and values for later reuse)."""

    config: ModelConfig

    if TYPE_CHECKING:  # Linen gives a module the hash of its fields, which checkers do not see

        def __hash__(self) -> int: ...

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        positions: jax.Array | None = None,
        segments: Sequence[Segment] = (),
        *,
        tree: Tree | None = None,
        keep_kv: bool = False,
        keep_routing: bool = False,
        replay_BTX: jax.Array | None = None,
        count_B: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        """Run the layers over new tokens.

        The embeddings of tokens past the vocabulary are read from the table `images`
        (vision/positions.py), which is stored next to the module's parameters like the adapters of
        lora.attach.

        Args:
          tokens_BT: int32 [B, T], right-padded with any id.
          positions: int32 [B, T], or [3, B, T] with a mrope_section; default: those of
            `token_positions`, from 0, in a tree along each path.
          segments: the memory that the new tokens may read.
          tree: the prefix tree of the rows that are packed into each row of tokens, without
            segments. None: a row of tokens is one sequence.
          keep_kv: whether to return the new tokens' keys and values.
          keep_routing: whether to return the new tokens' experts, in a model that has experts.
          replay_BTX: int, the experts of each token in each layer, layer after layer, as in
            `experts.route`; None: the router chooses them.
          count_B: int32, with keep_kv in a model that has a state: the number of tokens of each
            row that enter the state; None: all.

        Returns:
          (hidden_BTD after the final norm, (k, v) in the form of `segments.Segment` or None), and
          with keep_routing the `Routing` of [L, B, T]. In a model that has linear-attention layers,
          k and v are those of the others, and a third is their state.

        Raises:
          ValueError: three positions per token for a model with one, or a tree for a model that
            has a state.
        """
        c = self.config
        if c.has_state and tree is not None:
            raise ValueError("a model with linear-attention layers cannot read a prefix tree")
        init = with_axes(nn.initializers.normal(0.02), ("vocab", "embed"))
        embed: jax.Array = self.param("embed", init, (c.vocab_size, c.width))
        if not c.tied:
            self.param("head", init, (c.vocab_size, c.width))  # read by `head`
        images = self.get_variable("params", "images")
        if positions is None:
            end_BT = None if tree is None else tree.end_BT
            positions = token_positions({"images": images}, tokens_BT, end_BT=end_BT)
        if positions.ndim == 3 and not c.mrope_section:
            raise ValueError(
                f"positions have shape {positions.shape}, but the model has no mrope_section: "
                f"expected {tokens_BT.shape}"
            )
        rotary = {
            "full": (c.rope_theta, c.rope_scaling, c.mrope_section),
            "windowed": (c.window_rope_theta,),
        }
        angles = tuple(
            rotary_angles(positions, c.rotary_dim or c.head_dim, *rotary[name])
            for name in c.attention_kinds
            if name in rotary
        )
        # Look embeddings up on the devices that hold the table's columns, then move them to the
        # rows' devices: XLA would otherwise copy the result to all devices.
        text_BT = tokens_BT if images is None else jnp.minimum(tokens_BT, c.vocab_size - 1)
        x = embed[constrain(text_BT, "data_rows", None)].astype(c.dtype)
        x = constrain(constrain(x, "data_rows", None, "embed"), "rows", None, None)
        if c.scaled_embed:
            x = x * jnp.asarray(c.width**0.5, x.dtype)
        if images is not None:
            x = splice(x, tokens_BT, images, c.vocab_size)
        if tree is not None and "windowed" in c.attention_kinds:
            depth_BT = token_positions({}, tokens_BT, end_BT=tree.end_BT)
            tree = dataclasses.replace(tree, depth_BT=depth_BT)
        if tree is not None and tree.block:
            # With one long row, XLA's CPU backend is a fifth slower.
            block = tree.block
            x, angles, replay_BTX = jax.tree.map(
                lambda y: y.reshape(-1, block, *y.shape[2:]), (x, angles, replay_BTX)
            )
        replay = None
        if replay_BTX is not None:  # [L, B, T, k]
            replay = jnp.moveaxis(replay_BTX.reshape(*x.shape[:2], c.layers, -1), 2, 0)

        def rows_of(kind):
            held = [tokens_held(kind, one.length_N, one.window_N) for one in segments]
            return tuple(
                (held_N,) if one.rows_B is None else (held_N, one.rows_B)
                for held_N, one in zip(held, segments, strict=True)
            )

        kvs: Any = tuple((segment.k, segment.v) for segment in segments)
        if c.has_state:
            x, kept = self._hybrid(x, angles, rows_of("full"), kvs, segments, keep_kv, count_B)
            return RMSNorm(c.norm_eps, c.norm_plus_one, name="final_norm")(x), kept
        # The kernel reads a layer from the array of all layers.
        by_kernel = c.cache_kernel == "pages" and tokens_BT.shape[1] == 1
        paged = [by_kernel and is_page(segment, len(tokens_BT)) for segment in segments]
        block = _block_class(c)
        kind_of = [c.attention_kinds.index(layer.attention) for layer in c.kinds]
        mixed = len(c.attention_kinds) > 1
        layer_kinds = [layer.attention for layer in c.kinds] or ["full"] * c.layers
        if c.layers <= UNROLLED_LAYERS and not self.is_initializing():
            stacked = self.variables["params"]["layers"]
            layer_kvs, layer_routing = [], []
            for layer in range(c.layers):
                layer_params = _of_layer(stacked, layer)
                memory = tuple(
                    PageOfLayers(k[layer][None], v[layer][None], 0)
                    if page
                    else (k[layer], v[layer])
                    for (k, v), page in zip(kvs, paged, strict=True)
                )
                x, (kv, routing) = run_block(
                    c,
                    keep_kv,
                    kind_of[layer] if mixed else None,
                    layer_params,
                    *(x, angles, rows_of(layer_kinds[layer]), tree, memory),
                    None if replay is None else replay[layer],
                )
                layer_kvs.append(kv)
                layer_routing.append(routing)
            kv = routing = None
            if keep_routing:
                routing = jax.tree.map(lambda *x: jnp.stack(x), *layer_routing)
            if keep_kv:
                k, v = zip(*layer_kvs, strict=True)
                kv = k, v
        else:
            everything: Any = nn.broadcast
            one = PageOfLayers(everything, everything, 0)
            some = LayersByKind(everything, everything, 0, everything)
            numbers, axes, memory = np.arange(c.layers), [], []
            for kv, page, segment in zip(kvs, paged, segments, strict=True):
                if page:
                    axes.append(one)
                    memory.append(PageOfLayers(*kv, numbers))
                elif isinstance(segment.k, dict):
                    axes.append(some)
                    memory.append(LayersByKind(*kv, places(c), segment.window_N))
                else:
                    axes.append(0)
                    memory.append(kv)
            of_layers, kvs, rows = tuple(axes), tuple(memory), rows_of("full")
            layers: Any = nn.scan(  # Any: nn.scan is typed as Block but takes stacked memory
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0, of_layers, 0),
                length=c.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            kinds = jnp.array(kind_of, jnp.int32) if mixed else None
            x, (kv, routing) = layers(c, name="layers")(
                x, angles, rows, keep_kv, tree, kinds, kvs, replay
            )
        x = RMSNorm(c.norm_eps, c.norm_plus_one, name="final_norm")(x)
        x = x.reshape(*tokens_BT.shape, c.width)
        if not keep_routing:
            return x, kv
        shape = c.layers, *tokens_BT.shape
        return x, kv, jax.tree.map(lambda y: y.reshape(*shape, y.shape[-1]), routing)

    def _hybrid(
        self,
        x: jax.Array,
        angles: Any,
        rows: tuple[Any, ...],
        kvs: Any,
        segments: Sequence[Segment],
        keep_kv: bool,
        count_B: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """Run layers of which some have linear attention; see model/hybrid.py."""
        c = self.config
        if self.is_initializing():
            self.param("layers", lambda key: hybrid.init_layers(c, Block(c, parent=None), x, key))
        block = _block_class(c)

        def full(params, x, memory):
            args = x, angles, rows, keep_kv, None, None, memory
            x, (kv, _) = block(c, parent=None).apply({"params": params}, *args)
            return x, kv

        return hybrid.run_layers(
            c,
            self.variables["params"]["layers"],
            *(x, full, kvs, segments[-1].state if segments else None, count_B),
            keep=keep_kv,
            unrolled=hybrid.is_unrolled(c, UNROLLED_LAYERS),
        )


def with_cache(
    model: Qwen, *, cache_dtype: str, cache_kernel: str, platform: str, keep_experts: bool = False
) -> Qwen:
    """Return the model with these fields of `ModelConfig`, for sampling.

    Args:
      platform: of the devices that sample, "cpu", "gpu" or "tpu".
      keep_experts: whether calls return the experts of each token (rollout/routes.py).

    Raises:
      ValueError: the kernel does not read the model's heads or layers, or a model without experts
        is to keep them.
    """
    if keep_experts and model.config.experts is None:
        raise ValueError(
            "config.rollout.replay_experts is True, but the model has no experts; set it to False"
        )
    if cache_kernel == "pages" and (expected := unread_heads(model.config.head_dim, platform)):
        raise ValueError(
            f"config.rollout.cache_kernel is 'pages', but the model's heads have "
            f"{model.config.head_dim} numbers, not {expected}; set it to xla"
        )
    if cache_kernel == "pages" and "windowed" in model.config.attention_kinds:
        raise ValueError(
            "config.rollout.cache_kernel is 'pages', which reads all positions, but the model has "
            "windowed layers; set it to xla"
        )
    if cache_kernel == "pages" and model.config.has_state:
        raise ValueError(
            "config.rollout.cache_kernel is 'pages', but the model has linear-attention layers; "
            "set it to xla"
        )
    config = dataclasses.replace(
        model.config,
        cache_dtype=cache_dtype,
        cache_kernel=cache_kernel,
        keep_experts=keep_experts,
    )
    return model if config == model.config else Qwen(config)


def head(params: Params) -> jax.Array:
    """Return the output matrix [V, D]: the embedding if the two are tied."""
    return params["head"] if "head" in params else params["embed"]


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [..., V] of hidden states [..., D]."""
    w = head(params).astype(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, w, preferred_element_type=jnp.float32)


def separate_layers(config: ModelConfig, params: Params) -> Params:
    """Return the parameters with those of each layer apart, if the layers run one by one.

    A loop over tokens then reads them in place. XLA's CPU backend would copy each layer's from the
    stacks for every token.
    """
    if config.layers > UNROLLED_LAYERS or config.has_state:
        return params
    layers = {str(i): _of_layer(params["layers"], i) for i in range(config.layers)}
    return {**params, "layers": layers}


def _of_layer(layers: Params, index: int) -> Params:
    """Return the parameters of a layer, from stacks or from the result of `separate_layers`."""
    if str(index) in layers:
        return layers[str(index)]
    return jax.tree.map(lambda x: x[index], layers)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Return new parameters of a model on the default device: a plain nested dict of float32."""
    variables = Qwen(config).init(key, jnp.zeros((1, 1), jnp.int32))
    return nn.unbox(variables)["params"]


@functools.cache
def boxed_shapes(config: ModelConfig) -> Params:
    """Return the shapes of a model's parameters, in boxes that name their axes."""
    boxes = {
        tuple(path): nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), tuple(names))
        for path, shape, dtype, names in _list_params(config)
    }
    return unflatten_dict(boxes)


@kept_as_json
def _list_params(config: ModelConfig) -> list[list[Any]]:
    """Return [path, shape, dtype, names of the axes] of each of a model's parameters."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    key = jax.eval_shape(jax.random.key, 0)
    boxes = flatten_dict(jax.eval_shape(Qwen(config).init, key, tokens)["params"])
    return [
        [list(path), list(box.value.shape), str(box.value.dtype), list(box.names)]
        for path, box in boxes.items()
    ]
