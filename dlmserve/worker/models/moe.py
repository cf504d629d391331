"""Mixture of experts: a router chooses few of a layer's MLPs for each token, and their outputs are added up.

Each rank holds its columns of every expert, as of a dense MLP, so that the ranks' sums meet in the layer's own
all-reduce; the router is on all of them. Knows nothing of attention or of requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels
from dlmserve.worker.models.mlp import Mlp, MlpAsks, mlp_asks
from dlmserve.worker.shards import Shard
from dlmserve.worker.weights import Ask, Weights

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoeConfig:
    """What of the model is mixed, and how its router chooses."""

    layers: tuple[bool, ...]  # which have experts; the others are dense
    num_experts: int
    num_chosen: int  # for each token
    expert_size: int  # columns
    shared_size: int = 0  # of the expert that every token goes through; 0: there is none
    sigmoid: bool = False  # scores are sigmoids with a bias, chosen within groups (LLaDA 2); else a softmax
    num_groups: int = 1
    num_kept_groups: int = 1
    scale: float = 1.0  # of the chosen weights, which then sum up to it


def route(logits: Tensor, bias: Tensor | None, config: MoeConfig) -> tuple[Tensor, Tensor]:
    """Weights f32 and indices i64 of each token's experts, [T, num_chosen] each; logits f32 [T, num_experts].

    Softmax: the most probable experts, with their probabilities as they are. Sigmoid: `bias` f32 [num_experts] is
    added for the choice alone; of the groups of neighbouring experts those with the largest sum of their two best
    are kept; the weights are scaled to the sum `config.scale`.
    """
    if not config.sigmoid:
        return tuple(logits.softmax(-1).topk(config.num_chosen, -1))  # type: ignore[return-value]
    assert bias is not None
    scores = logits.sigmoid()
    ranked = (scores + bias).view(len(logits), config.num_groups, -1)
    groups = ranked.topk(min(2, ranked.shape[-1]), -1).values.sum(-1).topk(config.num_kept_groups, -1).indices
    is_kept = torch.zeros_like(ranked[..., 0]).scatter_(1, groups, 1.0).bool()
    ranked = ranked.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)
    chosen = ranked.topk(config.num_chosen, -1).indices
    weights = scores.gather(1, chosen)
    return config.scale * weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


class Experts(Protocol):
    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, d] and what `route` gave -> [T, d], to be summed over the ranks."""
        ...

    def shards(self) -> Iterator[Shard]: ...


class LoopedExperts:
    """Each expert that was chosen, one after the other, on its tokens.

    The host waits for their numbers, so a step with it cannot be captured in a graph.
    """

    def __init__(self, source: Weights, asks: list[MlpAsks]) -> None:
        self._experts = [Mlp(source, each) for each in asks]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order, counts = chosen.flatten().argsort(stable=True), torch.bincount(chosen.flatten()).tolist()
        tokens, scales = order // chosen.shape[1], weights.flatten()[order, None].to(x.dtype)
        y = torch.zeros_like(x)
        end = 0
        for expert, count in zip(self._experts, counts, strict=False):
            start, end = end, end + count
            if count:  # a token has an expert once: no row is added to twice
                mine = tokens[start:end]
                y.index_add_(0, mine, expert(x[mine]) * scales[start:end])
        return y

    def shards(self) -> Iterator[Shard]:
        for expert in self._experts:
            yield from expert.shards()


class GroupedExperts:
    """All experts in two grouped products, which read on the device where each expert's tokens end."""

    def __init__(self, source: Weights, asks: list[MlpAsks]) -> None:
        self._asks = asks
        self._gate_up = self._down = torch.empty(0)
        for i, each in enumerate(asks):
            gate, up, down = source.get(each.gate), source.get(each.up), source.get(each.down)
            if not i:  # allocated once: no second copy of all experts while they are read
                self._gate_up = gate.new_empty(len(asks), 2 * len(gate), gate.shape[1])
                self._down = down.new_empty(len(asks), *down.shape)
            torch.cat((gate, up), out=self._gate_up[i])
            self._down[i] = down
        self._ids = torch.arange(len(asks), device=self._down.device)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(ids, self._ids, right=True).int()
        gated = kernels.silu_gate(
            F.grouped_mm(x[order // chosen.shape[1]], self._gate_up.transpose(1, 2), offs=ends)
        )
        out = F.grouped_mm(gated, self._down.transpose(1, 2), offs=ends)
        of_tokens = torch.empty_like(out).index_copy_(0, order, out).view(*chosen.shape, -1)
        return (of_tokens * weights[..., None]).sum(1).to(x.dtype)

    def shards(self) -> Iterator[Shard]:
        gate_up, down = self._gate_up, self._down  # no reference to self: the model must be able to go
        size = gate_up.shape[1] // 2
        for i, each in enumerate(self._asks):
            yield Shard(each.gate, lambda i=i: gate_up[i, :size])
            yield Shard(each.up, lambda i=i: gate_up[i, size:])
            yield Shard(each.down, lambda i=i: down[i])


def grouped_fits(dtype: torch.dtype, device: str, hidden_size: int, columns: int) -> bool:
    """Whether the grouped product runs there without a wait of the host: bfloat16, from Hopper on."""
    if not device.startswith("cuda") or dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    # The kernel wants rows of whole 16 bytes.
    return torch.cuda.get_device_capability(device) >= (9, 0) and hidden_size % 8 == columns % 8 == 0


class Moe:
    """A layer's router and experts, in the place of its MLP."""

    def __init__(
        self,
        prefix: str,
        config: MoeConfig,
        hidden_size: int,
        source: Weights,
        parts: tuple[tuple[int, int], tuple[int, int]],
        grouped: bool,
    ) -> None:
        """`parts`: the columns of each expert, and of the shared one, that this rank holds."""
        self._config = config
        root = f"{prefix}mlp."
        self._asks = [Ask(f"{root}gate.weight", (config.num_experts, hidden_size))]
        if config.sigmoid:
            # Biases that differ little decide between experts.
            bias = Ask(f"{root}gate.expert_bias", (config.num_experts,), dtype=torch.float32)
            self._asks.append(bias)
        self._kept = [source.get(ask) for ask in self._asks]
        self._router = self._kept[0].float()
        self._bias = self._kept[1] if config.sigmoid else None

        def asks(name: str, size: int, part: tuple[int, int]) -> MlpAsks:
            gate, up, down = (f"{root}{name}.{each}" for each in PARTS)
            return mlp_asks((gate, up, down), hidden_size, size, part)

        experts = [asks(f"experts.{i}", config.expert_size, parts[0]) for i in range(config.num_experts)]
        self._experts: Experts = (
            GroupedExperts(source, experts) if grouped else LoopedExperts(source, experts)
        )
        shared = config.shared_size
        self._shared = Mlp(source, asks("shared_experts", shared, parts[1])) if shared else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d], to be summed over the ranks. The router computes in float32."""
        weights, chosen = route(F.linear(x.float(), self._router), self._bias, self._config)
        y = self._experts(x, weights, chosen)
        return y if self._shared is None else y + self._shared(x)

    def shards(self) -> Iterator[Shard]:
        for ask, tensor in zip(self._asks, self._kept, strict=True):
            yield Shard(ask, lambda tensor=tensor: tensor)
        yield from self._experts.shards()
        if self._shared is not None:
            yield from self._shared.shards()
