"""What a model is made of: its sizes, the names of its tensors, and which part of each a rank holds.

Knows nothing of weights or of how anything is computed.
"""

from dataclasses import dataclass

from dlmserve.errors import ConfigError
from dlmserve.worker.models.moe import MoeConfig
from dlmserve.worker.weights import Ask


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
    """Checkpoint names; `layer` is formatted with the layer's index and put before the per-layer ones.

    Either q, k and v, or `qkv`: one tensor that holds their rows in this order.
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    o: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    q: str = ""
    k: str = ""
    v: str = ""
    qkv: str = ""
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


def attention_asks(
    prefix: str, config: DecoderConfig, names: TensorNames, shard: Shard
) -> tuple[list[Ask], list[Ask] | None, Ask]:
    """A rank's rows of queries, keys and values, their biases if there are any, and its columns of the output."""
    d, unit = config.hidden_size, config.head_dim
    heads, kv_heads = (config.num_heads, shard.heads), (config.num_kv_heads, shard.kv_heads)
    of_each = ((names.q, *heads), (names.k, *kv_heads), (names.v, *kv_heads))
    num_rows = sum(count for _, count, _ in of_each) * unit
    asks, biases, before = list[Ask](), list[Ask](), 0
    for i, (name, count, (start, stop)) in enumerate(of_each):
        if names.qkv:
            first, last = (before + start) * unit, (before + stop) * unit
            asks.append(Ask(f"{prefix}{names.qkv}.weight", (num_rows, d), 0, first, last, part=i))
        else:
            asks.append(Ask(f"{prefix}{name}.weight", (count * unit, d), 0, start * unit, stop * unit))
            biases.append(Ask(f"{prefix}{name}.bias", (count * unit,), 0, start * unit, stop * unit))
        before += count
    start, stop = shard.heads
    output = Ask(f"{prefix}{names.o}.weight", (d, config.num_heads * unit), 1, start * unit, stop * unit)
    return asks, biases if config.qkv_bias else None, output
