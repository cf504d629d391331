"""The transformer that diffusion language models share, cut for one tensor-parallel rank.

Pre-norm blocks, RoPE (half-split), grouped-query attention without a causal mask, SwiGLU or a mixture of such.
Attention heads, MLP columns and vocabulary rows are sharded; each block ends its two halves with an all-reduce.
Computes hidden states of a packed batch; knows nothing of requests or thresholds.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dlmserve.worker.attention import Attention
from dlmserve.worker.batch import Batch
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.linear import Fused
from dlmserve.worker.models.config import DecoderConfig, Shard, TensorNames, attention_asks, shard_of
from dlmserve.worker.models.mlp import Mlp, mlp_asks
from dlmserve.worker.models.moe import Moe, grouped_fits
from dlmserve.worker.models.norms import HeadNorm, RMSNorm
from dlmserve.worker.models.rope import Rope
from dlmserve.worker.parallel import Group
from dlmserve.worker.shards import Shard as KeptShard
from dlmserve.worker.weights import Ask, Weights


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

        asks, biases, output = attention_asks(prefix, config, names, shard)
        self._qkv, self._o = Fused(weights, asks, biases), Fused(weights, [output])
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
