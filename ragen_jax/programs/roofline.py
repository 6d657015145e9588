"""Lower bounds on the run time of the programs on a chip: published peaks, and formulas of work.

A program takes at least the time of its floating-point operations at the chip's peak, and at least
the time of its memory traffic at the chip's bandwidth. Only unavoidable traffic is counted: the
weights once per pass, the cache, the activations saved for the backward pass, the optimizer's
state. Intermediate results, the vector units and the links between chips are not counted, so a real
step takes longer. XLA's cost analysis is no use here: it counts the body of a loop only once.

Axes: N rows of a chip, T new tokens, S positions read before them, V vocabulary, L layers.
"""

import dataclasses

from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.vision.config import VisionConfig
from ragen_jax.model.vision.images import Grid
from ragen_jax.model.vision.tower import windows


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts devices; a chip of v4 or TPU7x has two."""

    peak_flops: float  # bfloat16, per second
    bandwidth: float  # HBM bandwidth, bytes per second
    hbm_gib: float  # the memory that libtpu's compiler lets a program use
    topologies: tuple[str, ...]  # examples that the compiler accepts


# Peaks and bandwidths: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, November 2026; the
# figures of v4 (275e12, 1200e9) and TPU7x (2307e12, 7380e9) are halved. HBM: from error messages of
# the compiler of libtpu 0.0.51, such as "exceeds available HBM (15.75G)".
CHIPS = {
    "v4": Chip(137.5e12, 600e9, 15.25, ("2x2x1", "2x2x2", "2x2x4")),
    "v5e": Chip(197e12, 819e9, 15.75, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "16x16")),
    "v5p": Chip(459e12, 2765e9, 95.73, ("2x2x1", "2x2x2", "2x2x4", "4x4x4")),
    "v6e": Chip(918e12, 1638e9, 31.24, ("1x1", "2x2", "2x4", "4x4", "8x8", "16x16")),
    "tpu7x": Chip(1153.5e12, 3690e9, 94.74, ("2x2x1", "2x2x2")),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of one call of a program on one chip."""

    flops: float
    bytes: float

    def seconds(self, chip: Chip) -> float:
        """Return the lower bound on the time of a call."""
        return max(self.flops / chip.peak_flops, self.bytes / chip.bandwidth)


@dataclasses.dataclass(frozen=True)
class Work:
    """The cost of a model's passes on one of `tensor` x (row shards) chips.

    `expert` row shards share the experts of a mixture: each has a part of them, and runs it on the
    tokens of all.

    With width D, H heads and K key-value heads of size h, and MLP width F, the matrix products of
    one layer take 2 (D (H + 2K) h + H h D + 3 D F) operations per token. Attention takes 4 H h per
    position attended to, including masked positions that the kernel computes. The output head
    takes 2 D V.
    """

    config: ModelConfig
    tensor: int = 1
    expert: int = 1

    @property
    def _item(self) -> int:
        return 4 if self.config.dtype == "float32" else 2

    @property
    def layer_weights(self) -> int:
        """Number of matrix entries of a layer, including all experts."""
        c = self.config
        if c.experts is None:
            return self._attention_weights + 3 * c.width * c.mlp_width
        return self._attention_weights + c.width * c.experts.count * (1 + 3 * c.experts.width)

    @property
    def _attention_weights(self) -> int:
        """Number of matrix entries of attention; with linear attention, the mean over layers."""
        c = self.config
        queries = c.heads * (2 if c.output_gate else 1)
        full = c.width * (queries + 2 * c.kv_heads) * c.head_dim
        full += c.heads * c.head_dim * c.width
        if c.delta is None:
            return full
        d, linear = c.delta, len(c.layers_with("delta_qkv"))
        values = d.value_heads * d.value_dim
        weights = c.width * (d.channels + 2 * values + 2 * d.value_heads) + d.taps * d.channels
        return round((linear * weights + (c.layers - linear) * full) / c.layers)

    @property
    def token_weights(self) -> int:
        """Number of matrix entries of a layer that a token is multiplied by."""
        c = self.config
        if c.experts is None or c.expert_form == "wide":
            return self.layer_weights
        per_token = c.experts.count + 3 * c.experts.chosen * c.experts.width
        return self._attention_weights + c.width * per_token

    @property
    def head_weights(self) -> int:
        """Number of matrix entries of the output head."""
        return self.config.width * self.config.vocab_size

    def layers(self, tokens: int, keys: float, in_window: float | None = None) -> float:
        """Return the FLOPs of a forward pass of all layers.

        Args:
          keys: positions attended to, summed over the tokens.
          in_window: the same in a windowed layer; None: `keys`, or no more than the window if a
            kernel computes them.
        """
        products = self.config.layers * 2 * self.token_weights * tokens / self.tensor
        return products + self.attention(tokens, keys, in_window)

    def attention(self, tokens: int, keys: float, in_window: float | None = None) -> float:
        """Return the FLOPs of attention of all layers in a forward pass; see `layers`.

        A linear-attention layer multiplies a vector by its state three times per token, whatever
        the keys.
        """
        c = self.config
        if c.delta is not None:
            d, linear = c.delta, len(c.layers_with("delta_qkv"))
            state = 6 * linear * d.value_heads * d.key_dim * d.value_dim * tokens
            full = 4 * c.heads * c.head_dim * (c.layers - linear) * keys
            return (full + state) / self.tensor
        if in_window is None:
            in_window = keys if c.attention == "xla" else min(keys, tokens * c.window)
        total = (c.layers - self._windowed) * keys + self._windowed * in_window
        return 4 * c.heads * c.head_dim * total / self.tensor

    def head(self, tokens: int) -> float:
        """Return the FLOPs of a forward pass of the output head."""
        return 2 * self.head_weights * tokens / self.tensor

    def weight_bytes(self, head: bool = True) -> float:
        """Return the bytes of reading every matrix once."""
        c = self.config
        weights = c.layers * self.layer_weights + head * self.head_weights
        if c.experts is not None:  # of which the chip has a part
            experts = c.layers * 3 * c.width * c.experts.count * c.experts.width
            weights -= experts * (1 - 1 / self.expert)
        return self._item * weights / self.tensor

    def cache_bytes(self, positions: int) -> float:
        """Return the bytes of the keys and values of `positions` positions."""
        c = self.config
        split = self.tensor if c.kv_heads % self.tensor == 0 else 1
        # int8 codes have a float32 scale.
        vector = c.head_dim + 4 if c.cache_dtype == "int8" else c.head_dim * self._item
        return 2 * len(c.layers_with("k")) * c.kv_heads * vector * positions / split

    def state_bytes(self, rows: int) -> float:
        """Return the bytes of the states of linear-attention layers of `rows` rows."""
        d = self.config.delta
        if d is None:
            return 0.0
        memory = 4 * d.value_heads * d.key_dim * d.value_dim / self.tensor  # float32
        row = memory + self._item * (d.taps - 1) * d.channels
        return len(self.config.layers_with("delta_qkv")) * row * rows

    @property
    def _windowed(self) -> int:
        """Number of windowed layers."""
        return sum(layer.attention == "windowed" for layer in self.config.kinds)

    def _held(self, S: int) -> int:
        """Return the positions of a row of S that a windowed layer holds (window_cache.py)."""
        return min(S, self.config.window) if self._windowed else S

    def held_bytes(self, N: int, S: int) -> float:
        """Return the bytes of a cache of N rows of S positions with windows only."""
        dropped = self._windowed / self.config.layers * (S - self._held(S))
        return self.cache_bytes(N) * (S - dropped)

    def causal_keys(self, N: int, T: int) -> float:
        """Return the number of positions that T tokens of N rows attend to among themselves."""
        whole = self.config.attention == "xla"  # the plain form also computes the masked half
        return N * (T * T if whole else T * (T + 1) / 2)

    # ---------------------------------------------------------------- programs

    def prefill(self, N: int, T: int) -> Cost:
        """Return the cost of sample.prefill: all tokens, then the last token of each row again."""
        flops = self.layers(N * T, self.causal_keys(N, T)) + self.layers(N, N * (T + 1))
        traffic = self.weight_bytes(head=False) + self.weight_bytes() + 2 * self.cache_bytes(N * T)
        return Cost(flops + self.head(N), traffic)

    def extend(self, N: int, S: int, T: int) -> Cost:
        """Return the cost of sample.extend to a cache of S positions.

        It reads T tokens, then the last token of each row again.
        """
        held = self._held(S)
        flops = self.layers(N * T, N * T * (S + T), N * T * (held + T))
        flops += self.layers(N, N * (S + 1), N * (held + 1))
        # The old cache is read; the new cache is written, and read by both passes.
        traffic = self.weight_bytes(head=False) + self.weight_bytes() + 4 * self.held_bytes(N, S)
        return Cost(flops + self.head(N), traffic)

    def read(self, N: int, S: int, T: int) -> Cost:
        """Return the cost of chunks.read of T tokens after S positions."""
        flops = self.layers(N * T, N * T * (S + T), N * T * (self._held(S) + T))
        cached = self.held_bytes(N, S) + self.cache_bytes(N * T) + 2 * self.state_bytes(N)
        return Cost(flops, self.weight_bytes(head=False) + cached)

    def fold_tail(self, N: int, T: int) -> Cost:
        """Return the cost of tails.fold_tail of T new tokens of N rows: windows and states move."""
        window = (
            self._windowed / self.config.layers * self.cache_bytes(N * (self.config.window + T))
        )
        return Cost(0.0, 2 * (window + self.state_bytes(N)))

    def decode(self, N: int, S: int, T: int) -> Cost:
        """Return the cost of sample.decode of T tokens after S positions if no row stops early."""
        passes = T - 1  # the first token is drawn from the given logits
        layers = self.layers(N, N * (S + T + 1), N * (self._held(S) + T + 1))
        # States are read and written.
        cached = self.held_bytes(N, S) + self.cache_bytes(N * T) + 2 * self.state_bytes(N)
        return Cost(passes * (layers + self.head(N)), passes * (self.weight_bytes() + cached))

    def score_prompts(self, N: int, T: int) -> Cost:
        """Return the cost of cross_scoring.read_prompts."""
        flops = self.layers(N * T, self.causal_keys(N, T))
        return Cost(flops, self.weight_bytes(head=False) + self.cache_bytes(N * T))

    def score(self, N: int, prompts: int, S: int, T: int) -> Cost:
        """Return the cost of cross_scoring.score_block.

        It scores N (prompt, reasoning) rows of T tokens after S positions.
        """
        flops = self.layers(N * T, N * T * (S + T)) + self.head(N * T)
        return Cost(flops, self.weight_bytes() + self.cache_bytes(prompts * S))

    def mediation(self, N: int, X: int, Z: int, E: int) -> Cost:
        """Return the cost of mediation.measure of N replies.

        A prompt has X tokens, a reasoning has Z and the rest of the reply has E. The prompt is read
        once, the reasoning three times and the rest six times. All are read once more with a
        backward pass, which costs twice a forward pass: it forms no gradient of a parameter.
        """
        once = [
            self.layers(N * X, self.causal_keys(N, X)),
            self.layers(N * Z, N * Z * (X + Z)),
            self.layers(N * E, N * E * (X + Z + E)) + self.head(N * E),
        ]
        flops = sum(n * part for n, part in zip((3, 5, 8), once, strict=True))
        return Cost(flops, 13 * self.weight_bytes() + 10 * self.cache_bytes(N * (X + Z)))

    def read_rows(
        self, positions: int, keys: float, predictions: int, *, micro_batches: float, head: bool
    ) -> Cost:
        """Return the cost of passes.read_micro_batches.

        Args:
          positions, keys, predictions: as in `update`.
          head: whether the pass runs the model's output head.
        """
        flops = self.layers(positions, keys) + head * self.head(predictions)
        return Cost(micro_batches * flops, micro_batches * self.weight_bytes(head=head))

    def update(
        self,
        positions: int,
        keys: float,
        predictions: int,
        *,
        micro_batches: float,
        reference: bool,
        trained: int,
        frozen: bool = False,
        with_head: bool = True,
    ) -> Cost:
        """Return the cost of policy.policy_gradient or critic.critic_gradient.

        Args:
          positions: of a micro-batch on a chip.
          keys: positions attended to, summed over the positions.
          predictions: tokens whose probabilities are computed.
          with_head: False for the critic, whose head is a vector.
          reference: whether the KL term runs the reference model.
          trained: number of parameters whose gradient the chip holds.
          frozen: whether only LoRA's adapters are trained, so that no gradient of a matrix is
            formed.
        """
        c = self.config
        remat = int(c.remat)
        forward, scores = self.layers(positions, keys), self.attention(positions, keys)
        # A backward pass takes two products for each product of the forward pass. A kernel
        # recomputes the scores: half of attention's forward pass. The head always recomputes its
        # logits.
        layers = (3 + remat) * forward + (0 if c.attention == "xla" else scores / 2)
        head = with_head * (4 + reference) * self.head(predictions)
        if frozen:
            layers -= self.layers(positions, 0)
            head -= with_head * self.head(predictions)
        flops = layers + head + reference * forward
        saved = 2 * c.layers * positions * c.width * self._item  # layer inputs, written and read
        weights = (2 + remat + reference) * self.weight_bytes(head=False)
        weights += with_head * (3 + reference) * self._item * self.head_weights / self.tensor
        trained_bytes = 4 * trained  # float32
        # Each micro-batch adds to the gradient.
        traffic = micro_batches * (weights + saved + 2 * trained_bytes)
        return Cost(micro_batches * flops, traffic)

    def apply(self, trained: int) -> Cost:
        """Return the cost of optimize.apply_gradient.

        It reads the gradient for its norm, and four float32 arrays for the norm of the step; then
        Adam reads the four again and writes three.
        """
        return Cost(0.0, 12 * 4 * trained)

    def gradients(
        self,
        positions: int,
        keys: float,
        predictions: int,
        *,
        micro_batches: float,
        parts: int,
        reference: bool,
        trained: int,
        frozen: bool = False,
    ) -> Cost:
        """Return the cost of gradients.bucket_products: one forward pass, one backward per part.

        Args: as in `update`.
        """
        c = self.config
        remat = int(c.remat)
        forward, scores = self.layers(positions, keys), self.attention(positions, keys)
        layers = (1 + parts * (2 + remat)) * forward
        layers += 0 if c.attention == "xla" else parts * scores / 2
        head = (1 + 3 * parts + reference) * self.head(predictions)
        if frozen:
            layers -= parts * self.layers(positions, 0)
            head -= parts * self.head(predictions)
        flops = layers + head + reference * forward
        saved = (1 + parts) * c.layers * positions * c.width * self._item
        weights = (1 + parts * (1 + remat) + reference) * self.weight_bytes(head=False)
        weights += (1 + 2 * parts + reference) * self._item * self.head_weights / self.tensor
        sums = 2 * parts * 4 * trained  # float32, read and written
        return Cost(micro_batches * flops, micro_batches * (weights + saved + sums))

    def resharding(self, *, shards: int) -> Cost:
        """Return the cost of layout.resharding, the parameters' copy for sampling.

        It reads a chip's shard in float32 and writes a shard in the model's dtype.
        """
        return Cost(0.0, 4 * self.parameters / shards + self.weight_bytes())

    @property
    def parameters(self) -> int:
        """Number of matrix entries of the model, including the embedding and head."""
        c = self.config
        return c.layers * self.layer_weights + (1 if c.tied else 2) * self.head_weights


@dataclasses.dataclass(frozen=True)
class TowerWork:
    """The cost of a vision tower on one of `tensor` x (row shards) chips.

    With width D and MLP width F, the matrix products of one layer take 2 (4 D^2 + 3 D F) operations
    per patch. Attention takes 4 D per patch attended to, including the padding of the windows'
    tables. Embedding a patch of C numbers takes 2 C D. Merging m patches into a token takes
    2 ((m D)^2 + m D out).
    """

    config: VisionConfig
    tensor: int = 1

    def see(self, N: int, grid: Grid) -> Cost:
        """Return the cost of tower.see of N images of a grid."""
        products, attention, weights = self._once(N, grid)
        return Cost(products + attention, weights)

    def back(self, N: int, grid: Grid) -> Cost:
        """Return the cost of image_table.tower_gradient of N images of a grid.

        It runs two forward passes and a backward pass. The backward pass has as many matrix
        products as a forward pass, because no gradient of a matrix is formed, and twice as many
        products of attention.
        """
        products, attention, weights = self._once(N, grid)
        return Cost(3 * products + 4 * attention, 3 * weights)

    def _once(self, N: int, grid: Grid) -> tuple[float, float, float]:
        """Return (operations of matrix products, of attention, bytes of weights)."""
        c = self.config
        P, D, merged = grid[1] * grid[2], c.hidden_size, c.spatial_merge_size**2
        side = c.window_size // (c.patch_size * c.spatial_merge_size)
        patch_WS, _, _ = windows(grid, c.spatial_merge_size, side)
        whole = len(c.fullatt_block_indexes)
        keys = whole * P * P + (c.depth - whole) * patch_WS.size * patch_WS.shape[1]
        layers = c.depth * (4 * D * D + 3 * D * c.intermediate_size)
        ends = merged * D * (merged * D + c.out_hidden_size)
        patch = c.patch_numbers * D
        products = P * (patch + layers / self.tensor) + P // merged * ends / self.tensor
        item = 4 if c.dtype == "float32" else 2
        return (
            N * 2 * products,
            N * 4 * D * keys / self.tensor,
            item * (patch + (layers + ends) / self.tensor),
        )
