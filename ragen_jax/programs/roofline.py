"""Least times of our programs on a chip: published figures, and closed formulas of their work.

A program can take no less than its floating-point operations at the chip's peak, nor less than
its memory traffic at the chip's bandwidth. The traffic counted is what no schedule can avoid:
weights once a pass, the cache, what the backward pass keeps, the optimizer's state.
Intermediate results, the vector units and the links between chips are not counted, so a real
step takes longer. XLA's own cost analysis counts the body of a loop once and is of no use here.

Axes: N rows of a chip, T new tokens, S positions read before them, V vocabulary, L layers.
"""

import dataclasses

from ragen_jax.model.qwen import ModelConfig
from ragen_jax.model.vision.config import VisionConfig
from ragen_jax.model.vision.images import Grid
from ragen_jax.model.vision.tower import windows


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them; v4 and TPU7x have two of them on a chip."""

    peak_flops: float  # bfloat16, per second
    bandwidth: float  # of HBM, bytes per second
    hbm_gib: float  # what libtpu's compiler lets a program use
    topologies: tuple[str, ...]  # examples that the compiler accepts


# Peaks and bandwidths: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, November 2026; those
# of v4 (275e12, 1200e9) and TPU7x (2307e12, 7380e9) are halved. HBM: provoked from the compiler
# of libtpu 0.0.51, "exceeds available HBM (15.75G)" and so on.
CHIPS = {
    "v4": Chip(137.5e12, 600e9, 15.25, ("2x2x1", "2x2x2", "2x2x4")),
    "v5e": Chip(197e12, 819e9, 15.75, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "16x16")),
    "v5p": Chip(459e12, 2765e9, 95.73, ("2x2x1", "2x2x2", "2x2x4", "4x4x4")),
    "v6e": Chip(918e12, 1638e9, 31.24, ("1x1", "2x2", "2x4", "4x4", "8x8", "16x16")),
    "tpu7x": Chip(1153.5e12, 3690e9, 94.74, ("2x2x1", "2x2x2")),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one call of a program, on one chip."""

    flops: float
    bytes: float

    def seconds(self, chip: Chip) -> float:
        """The least time of a call."""
        return max(self.flops / chip.peak_flops, self.bytes / chip.bandwidth)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a model's passes cost on one of `tensor` x (row shards) chips.

    Matrix products of one layer and token, with D width, H heads, K key-value heads of h, F MLP:
    2 (D (H + 2K) h + H h D + 3 D F) operations; attention 4 H h for each position attended to,
    as the kernel runs it, masked ones included; the output head 2 D V.
    """

    config: ModelConfig
    tensor: int = 1

    @property
    def _item(self) -> int:
        return 4 if self.config.dtype == "float32" else 2

    @property
    def layer_weights(self) -> int:
        """Matrix entries of a layer."""
        c = self.config
        attention = c.width * (c.heads + 2 * c.kv_heads) * c.head_dim
        return attention + c.heads * c.head_dim * c.width + 3 * c.width * c.mlp_width

    @property
    def head_weights(self) -> int:
        """Matrix entries of the output head."""
        return self.config.width * self.config.vocab_size

    def layers(self, tokens: int, keys: float) -> float:
        """FLOPs of all layers, forward; keys: positions attended to, summed over the tokens."""
        c = self.config
        attention = 4 * c.heads * c.head_dim * keys
        return c.layers * (2 * self.layer_weights * tokens + attention) / self.tensor

    def head(self, tokens: int) -> float:
        """FLOPs of the output head, forward."""
        return 2 * self.head_weights * tokens / self.tensor

    def weight_bytes(self, head: bool = True) -> float:
        """Bytes of reading every matrix once."""
        weights = self.config.layers * self.layer_weights + head * self.head_weights
        return self._item * weights / self.tensor

    def cache_bytes(self, positions: int) -> float:
        """Bytes of the keys and values of so many positions."""
        c = self.config
        split = self.tensor if c.kv_heads % self.tensor == 0 else 1
        return 2 * c.layers * c.kv_heads * c.head_dim * self._item * positions / split

    def causal_keys(self, N: int, T: int) -> float:
        """Positions that T tokens of N rows attend to among themselves."""
        whole = self.config.attention == "xla"  # the plain form runs the masked half, too
        return N * (T * T if whole else T * (T + 1) / 2)

    # ---------------------------------------------------------------- programs

    def prefill(self, N: int, T: int) -> Cost:
        """sample.prefill: all tokens, then the last one of each row again."""
        flops = self.layers(N * T, self.causal_keys(N, T)) + self.layers(N, N * (T + 1))
        traffic = self.weight_bytes(head=False) + self.weight_bytes() + 2 * self.cache_bytes(N * T)
        return Cost(flops + self.head(N), traffic)

    def extend(self, N: int, S: int, T: int) -> Cost:
        """sample.extend to a cache of S positions: T tokens, then the last of each row again."""
        flops = self.layers(N * T, N * T * (S + T)) + self.layers(N, N * (S + 1))
        # The old cache is read, the new one written, and read by both passes.
        traffic = self.weight_bytes(head=False) + self.weight_bytes() + 4 * self.cache_bytes(N * S)
        return Cost(flops + self.head(N), traffic)

    def read(self, N: int, S: int, T: int) -> Cost:
        """chunks.read of T tokens behind S positions."""
        flops = self.layers(N * T, N * T * (S + T))
        return Cost(flops, self.weight_bytes(head=False) + self.cache_bytes(N * (S + T)))

    def decode(self, N: int, S: int, T: int) -> Cost:
        """sample.decode of T tokens behind S positions, no row stopping before."""
        passes = T - 1  # the first token is drawn from the logits that are there
        flops = passes * (self.layers(N, N * (S + T + 1)) + self.head(N))
        return Cost(flops, passes * (self.weight_bytes() + self.cache_bytes(N * (S + T))))

    def score_prompts(self, N: int, T: int) -> Cost:
        """cross_scoring.read_prompts."""
        flops = self.layers(N * T, self.causal_keys(N, T))
        return Cost(flops, self.weight_bytes(head=False) + self.cache_bytes(N * T))

    def score(self, N: int, prompts: int, S: int, T: int) -> Cost:
        """cross_scoring.score_block: N (prompt, reasoning) rows of T tokens behind S positions."""
        flops = self.layers(N * T, N * T * (S + T)) + self.head(N * T)
        return Cost(flops, self.weight_bytes() + self.cache_bytes(prompts * S))

    def mediation(self, N: int, X: int, Z: int, E: int) -> Cost:
        """mediation.measure of N replies: prompts of X tokens, reasonings of Z, E behind them.

        The prompt is read once, a reasoning three times and what is behind it six, and all once
        more with its backward pass (twice a forward's, no parameter's gradient among it).
        """
        once = [
            self.layers(N * X, self.causal_keys(N, X)),
            self.layers(N * Z, N * Z * (X + Z)),
            self.layers(N * E, N * E * (X + Z + E)) + self.head(N * E),
        ]
        flops = sum(n * part for n, part in zip((3, 5, 8), once, strict=True))
        return Cost(flops, 13 * self.weight_bytes() + 10 * self.cache_bytes(N * (X + Z)))

    def read_rows(self, N: int, T: int, *, micro_batches: int, head: bool) -> Cost:
        """passes.read_micro_batches of N rows of T tokens on a chip; head: whether the model's."""
        tokens = N * (T - 1)
        flops = self.layers(tokens, self.causal_keys(N, T - 1)) + head * self.head(tokens)
        return Cost(micro_batches * flops, micro_batches * self.weight_bytes(head=head))

    def update(
        self,
        N: int,
        T: int,
        *,
        micro_batches: int,
        reference: bool,
        trained: int,
        frozen: bool = False,
        with_head: bool = True,
    ) -> Cost:
        """policy.policy_gradient or critic.critic_gradient, micro-batches of N rows of T tokens.

        Args:
          with_head: False for the critic, whose own head is a vector.
          reference: whether the KL term runs the reference model.
          trained: parameters whose gradient the chip holds.
          frozen: whether those are LoRA's, so that no gradient of a matrix is formed.
        """
        c = self.config
        remat, tokens = int(c.remat), N * (T - 1)
        keys = self.causal_keys(N, T - 1)
        forward, scores = self.layers(tokens, keys), self.layers(0, keys)
        # A backward pass is two products for each one; a kernel recomputes the scores, which is
        # half of attention's forward. The head always recomputes its logits.
        layers = (3 + remat) * forward + (0 if c.attention == "xla" else scores / 2)
        head = with_head * (4 + reference) * self.head(tokens)
        if frozen:
            layers -= self.layers(tokens, 0)
            head -= with_head * self.head(tokens)
        flops = layers + head + reference * forward
        saved = 2 * c.layers * tokens * c.width * self._item  # layer inputs, written and read
        weights = (2 + remat + reference) * self.weight_bytes(head=False)
        weights += with_head * (3 + reference) * self._item * self.head_weights / self.tensor
        trained_bytes = 4 * trained  # float32
        # Each micro-batch adds to the gradient.
        traffic = micro_batches * (weights + saved + 2 * trained_bytes)
        return Cost(micro_batches * flops, traffic)

    def apply(self, trained: int) -> Cost:
        """optimize.apply_gradient: Adam reads four arrays of float32 and writes three."""
        return Cost(0.0, 7 * 4 * trained)

    def gradients(
        self,
        N: int,
        T: int,
        *,
        micro_batches: int,
        parts: int,
        reference: bool,
        trained: int,
        frozen: bool = False,
    ) -> Cost:
        """gradients.bucket_products: one forward pass and a backward pass for each part.

        Args: as in `update`.
        """
        c = self.config
        remat, tokens = int(c.remat), N * (T - 1)
        keys = self.causal_keys(N, T - 1)
        forward, scores = self.layers(tokens, keys), self.layers(0, keys)
        layers = (1 + parts * (2 + remat)) * forward
        layers += 0 if c.attention == "xla" else parts * scores / 2
        head = (1 + 3 * parts + reference) * self.head(tokens)
        if frozen:
            layers -= parts * self.layers(tokens, 0)
            head -= parts * self.head(tokens)
        flops = layers + head + reference * forward
        saved = (1 + parts) * c.layers * tokens * c.width * self._item
        weights = (1 + parts * (1 + remat) + reference) * self.weight_bytes(head=False)
        weights += (1 + 2 * parts + reference) * self._item * self.head_weights / self.tensor
        sums = 2 * parts * 4 * trained  # float32, read and written
        return Cost(micro_batches * flops, micro_batches * (weights + saved + sums))

    def resharding(self, *, shards: int) -> Cost:
        """sharding's copy for sampling: reads the float32 share, writes the other."""
        return Cost(0.0, 4 * self.parameters / shards + self.weight_bytes())

    @property
    def parameters(self) -> int:
        """Matrix entries of the model, embedding and head included."""
        c = self.config
        return c.layers * self.layer_weights + (1 if c.tied else 2) * self.head_weights


@dataclasses.dataclass(frozen=True)
class TowerWork:
    """What a vision tower costs on one of `tensor` x (row shards) chips.

    Matrix products of one layer and patch, with D width and F MLP: 2 (4 D^2 + 3 D F) operations;
    attention 4 D for each patch attended to, as tables of windows run it, padding included; 2 C D
    for a patch of C numbers; and of a token, which is m patches, 2 ((m D)^2 + m D out).
    """

    config: VisionConfig
    tensor: int = 1

    def see(self, N: int, grid: Grid) -> Cost:
        """vision.see of N images of a grid."""
        products, attention, weights = self._once(N, grid)
        return Cost(products + attention, weights)

    def back(self, N: int, grid: Grid) -> Cost:
        """tower_gradient of N images of a grid: it sees them twice, a backward pass is as
        many products where no gradient of a matrix is formed, and twice as many of attention."""
        products, attention, weights = self._once(N, grid)
        return Cost(3 * products + 4 * attention, 3 * weights)

    def _once(self, N: int, grid: Grid) -> tuple[float, float, float]:
        """(operations of matrix products, of attention, bytes of weights)."""
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
