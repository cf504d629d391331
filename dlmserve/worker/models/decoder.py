"""The transformer that diffusion language models share, cut for one tensor-parallel rank.

Pre-norm blocks, RoPE (half-split), grouped-query attention without a causal mask, SwiGLU or a mixture of such.
Attention heads, MLP columns and vocabulary rows are sharded; each block ends its two halves with an all-reduce.
Computes hidden states of a packed batch; knows nothing of requests or thresholds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmserve.errors import ConfigError
from dlmserve.worker.attention import Attention
from dlmserve.worker.batch import Batch
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.linear import Fused
from dlmserve.worker.models.mlp import Mlp, mlp_asks
from dlmserve.worker.models.moe import Moe, MoeConfig, grouped_fits
from dlmserve.worker.models.norms import HeadNorm, RMSNorm
from dlmserve.worker.models.rope import Rope
from dlmserve.worker.parallel import Group
from dlmserve.worker.shards import Shard as KeptShard
from dlmserve.worker.weights import Ask, Weights


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of the whole model, and what differs between families."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    max_len: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    rope_in_float32: bool  # rotate in float32 (LLaDA) or in the model's dtype (Dream)
    shifted_logits: bool  # the output at column i predicts column i + 1 (Dream)
    tied_head: bool = False
    qk_norm: bool = False  # an RMSNorm of each head's query and key, before they rotate
    rotary_dim: int | None = None  # of a head's entries the first so many rotate; None: all
    moe: MoeConfig | None = None
    block_causal: bool = False  # a position sees its block and earlier ones; the batch says where blocks end


@dataclass(frozen=True)
class TensorNames:
    """Checkpoint names; `layer` is formatted with the layer's index and put before the per-layer ones."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    o: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    q_norm: str = ""
    k_norm: str = ""


@dataclass(frozen=True)
class Shard:
    """Which part of each dimension a rank holds: [start, stop) of heads, KV heads, MLP columns, vocabulary.

    `experts`: of the columns of each expert, and of the shared one.
    """

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    mlp: tuple[int, int]
    experts: tuple[tuple[int, int], tuple[int, int]]
    vocab: tuple[int, int]


def shard_of(config: DecoderConfig, rank: int, size: int) -> Shard:
    """Raises ConfigError where the heads or the MLP do not divide. KV heads fewer than ranks are replicated."""
    expert_size, shared_size = (config.moe.expert_size, config.moe.shared_size) if config.moe else (0, 0)
    for what, count in (
        ("attention heads", config.num_heads),
        ("MLP columns", config.mlp_size),
        ("columns of an expert", expert_size),
        ("columns of the shared expert", shared_size),
    ):
        if count % size:
            raise ConfigError(
                f"TP degree {size} does not divide the model's {count} {what}; choose one that does"
            )
    kv = config.num_kv_heads
    if kv % size and size % kv:
        raise ConfigError(f"TP degree {size} and the model's {kv} KV heads: one must divide the other")
    kv_heads = _even(kv, rank, size) if kv >= size else (rank * kv // size, rank * kv // size + 1)
    rows = -(-config.vocab_size // size)  # the last rank may hold fewer
    vocab = (min(rank * rows, config.vocab_size), min((rank + 1) * rows, config.vocab_size))
    return Shard(
        heads=_even(config.num_heads, rank, size),
        kv_heads=kv_heads,
        mlp=_even(config.mlp_size, rank, size),
        experts=(_even(expert_size, rank, size), _even(shared_size, rank, size)),
        vocab=vocab,
    )


def _even(count: int, rank: int, size: int) -> tuple[int, int]:
    return rank * count // size, (rank + 1) * count // size


class Layer:
    """One transformer block."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        names: TensorNames,
        weights: Weights,
        shard: Shard,
        group: Group,
        attention: Attention,
        grouped: bool,
    ) -> None:
        """`grouped`: experts are computed by grouped products, see moe.py."""
        self._index, self._group, self._attention = index, group, attention
        prefix, d, hd = names.layer.format(index), config.hidden_size, config.head_dim
        self._num_heads = shard.heads[1] - shard.heads[0]
        self._num_kv_heads = shard.kv_heads[1] - shard.kv_heads[0]
        self._head_dim = hd

        def rows(name: str, full: int, part: tuple[int, int], unit: int = 1) -> Ask:
            return Ask(f"{prefix}{name}.weight", (full * unit, d), 0, part[0] * unit, part[1] * unit)

        def columns(name: str, full: int, part: tuple[int, int], unit: int = 1) -> Ask:
            return Ask(f"{prefix}{name}.weight", (d, full * unit), 1, part[0] * unit, part[1] * unit)

        def bias(name: str, full: int, part: tuple[int, int]) -> Ask:
            return Ask(f"{prefix}{name}.bias", (full * hd,), 0, part[0] * hd, part[1] * hd)

        heads, kv_heads = (config.num_heads, shard.heads), (config.num_kv_heads, shard.kv_heads)
        parts = ((names.q, *heads), (names.k, *kv_heads), (names.v, *kv_heads))
        biases = [bias(*part) for part in parts] if config.qkv_bias else None
        self._qkv = Fused(weights, [rows(*part, unit=hd) for part in parts], biases)
        self._o = Fused(weights, [columns(names.o, *heads, unit=hd)])
        self.mlp: Mlp | Moe
        if config.moe and config.moe.layers[index]:
            self.mlp = Moe(prefix, config.moe, d, weights, shard.experts, grouped)
        else:
            parts = (prefix + names.gate, prefix + names.up, prefix + names.down)
            self.mlp = Mlp(weights, mlp_asks(parts, d, config.mlp_size, shard.mlp))
        self._norms: list[tuple[Ask, Tensor]] = []

        def norm_weight(name: str, size: int) -> Tensor:
            ask = Ask(f"{prefix}{name}.weight", (size,))
            self._norms.append((ask, weights.get(ask)))
            return self._norms[-1][1]

        self._attention_norm = RMSNorm(norm_weight(names.attention_norm, d), config.norm_eps)
        self._mlp_norm = RMSNorm(norm_weight(names.mlp_norm, d), config.norm_eps)
        self._head_norms: tuple[HeadNorm, HeadNorm] | None = None
        if config.qk_norm:
            q_norm, k_norm = norm_weight(names.q_norm, hd), norm_weight(names.k_norm, hd)
            self._head_norms = HeadNorm(q_norm, config.norm_eps), HeadNorm(k_norm, config.norm_eps)

    def shards(self) -> Iterator[KeptShard]:
        for part in (self._qkv, self._o, self.mlp):
            yield from part.shards()
        for ask, weight in self._norms:
            yield _whole(ask, weight)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch, cache: KVCache | None, only_rows: bool
    ) -> Tensor:
        """x [T, d] -> [T, d], or [M, d] of the wanted rows: after the last layer's keys nothing else is needed."""
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(self._attention_norm(x)).view(
            len(x), num_rotated + self._num_kv_heads, self._head_dim
        )
        heads, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if self._head_norms is not None:
            of_q, of_k = self._head_norms
            heads = torch.cat((of_q(heads[:, : self._num_heads]), of_k(heads[:, self._num_heads :])), 1)
        rotated = Rope.rotate(heads, cos, sin)
        q, k = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        if batch.store_slots is not None:
            assert cache is not None
            picked = (k, v) if batch.store_from is None else (k[batch.store_from], v[batch.store_from])
            cache.write(self._index, batch.store_slots, *picked)
        if only_rows:
            q, x = q[batch.rows], x[batch.rows]
        y = self._attention.attend(q, k, v, batch.plan, batch.index, cache, self._index, only_rows)
        x = x + self._group.all_reduce_(self._o(y))
        return x + self._group.all_reduce_(self.mlp(self._mlp_norm(x)))


class Decoder:
    """A rank's shard of the model: packed batch in, hidden states of the wanted rows out."""

    def __init__(
        self,
        config: DecoderConfig,
        names: TensorNames,
        weights: Weights,
        group: Group,
        dtype: torch.dtype,
        device: str,
        attention: Attention,
    ) -> None:
        self.config, self.group, self.dtype, self.device = config, group, dtype, device
        self.attention = attention
        self.shard = shard_of(config, group.rank, group.size)
        vocab = (config.vocab_size, config.hidden_size)
        self._asks = [Ask(name, vocab, 0, *self.shard.vocab) for name in (names.embedding, names.head)]
        self._embedding = weights.get(self._asks[0])
        self.head = self._embedding if config.tied_head else weights.get(self._asks[1])
        self._norm_ask = Ask(names.final_norm, (config.hidden_size,))
        self._final_norm = RMSNorm(weights.get(self._norm_ask), config.norm_eps)
        rotary_dim, kind = (
            config.rotary_dim or config.head_dim,
            torch.float32 if config.rope_in_float32 else dtype,
        )
        self._rope = Rope(rotary_dim, config.rope_theta, config.max_len, kind, device)
        start, stop = self.shard.experts[0]
        self._grouped = grouped_fits(dtype, device, config.hidden_size, stop - start)
        self._layers = [
            Layer(i, config, names, weights, self.shard, group, attention, self._grouped)
            for i in range(config.num_layers)
        ]

    @property
    def fits_graphs(self) -> bool:
        """No layer makes the host wait."""
        return self.config.moe is None or self._grouped

    @property
    def details(self) -> str:
        """For the log: how experts are computed, where there are any."""
        if self.config.moe is None:
            return ""
        return ", experts " + (
            "in grouped products" if self._grouped else "one by one, which no graph captures"
        )

    def shards(self) -> Iterator[KeptShard]:
        """All that was read, for the next model of this rank."""
        yield _whole(self._asks[0], self._embedding)
        if not self.config.tied_head:
            yield _whole(self._asks[1], self.head)
        yield _whole(self._norm_ask, self._final_norm.weight)
        for layer in self._layers:
            yield from layer.shards()

    def forward(self, batch: Batch, cache: KVCache | None) -> Tensor:
        """Final, normalised hidden states of the batch's rows, [M, d], or of all its tokens, [T, d]."""
        x = self._embed(batch.tokens)
        cos, sin = self._rope.tables(batch.positions)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            x = layer(x, cos, sin, batch, cache, only_rows=i == last and batch.rows is not None)
        return self._final_norm(x)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._embedding[tokens]
        local = tokens - self.shard.vocab[0]
        here = (local >= 0) & (local < len(self._embedding))
        if not len(self._embedding):
            x = torch.zeros(len(tokens), self.config.hidden_size, dtype=self.dtype, device=self.device)
        else:
            x = self._embedding[local.clamp(0, len(self._embedding) - 1)] * here[:, None]
        return self.group.all_reduce_(x)


def _whole(ask: Ask, tensor: Tensor) -> KeptShard:
    return KeptShard(ask, lambda: tensor)
