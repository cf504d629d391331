"""From hidden states of masked positions to (token, confidence) for each, over all ranks of the instance.

Greedy rows take the fused path: hidden states against this rank's vocabulary rows, and the ranks exchange the best
logit, its token and the log of the sum of exponentials. Rows with a temperature draw by Gumbel-max with noise keyed
by (seed, position, step, token id): the same token in any batch and at any TP degree. Rows that need the whole
distribution (top-p, top-k, logprobs) gather it. The mask token is never an answer: it is excluded from the arg-max
and stays in the sum, as the public samplers' softmax has it.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels
from dlmserve.kernels import Rows
from dlmserve.messages import Decoding
from dlmserve.worker.models.decoder import Decoder


@dataclass(frozen=True)
class RowGroup:
    """Consecutive rows of one request: where they are, and how the request draws."""

    start: int
    end: int
    columns: np.ndarray
    step: int
    decoding: Decoding

    @property
    def is_greedy(self) -> bool:
        return self.decoding.temperature == 0

    @property
    def needs_distribution(self) -> bool:
        decoding = self.decoding
        return decoding.num_top > 0 or (
            decoding.temperature > 0 and (decoding.top_p < 1.0 or decoding.top_k > 0)
        )


@dataclass(frozen=True)
class Drawn:
    """token i64 [M], confidence f32 [M] (not finite where the row's logits are not); top: row -> alternatives."""

    token: Tensor
    confidence: Tensor
    top: dict[int, list[tuple[int, float]]]


class Sampler:
    """Draws for the shard of one rank; every method is collective over the model's group."""

    def __init__(self, model: Decoder, mask_id: int) -> None:
        self._model, self._group = model, model.group
        self._banned = (mask_id,)
        self._offset = model.shard.vocab[0]
        self._full_rows = -(-model.config.vocab_size // self._group.size)  # vocabulary rows of a full shard

    def draw(self, hidden: Tensor, groups: list[RowGroup]) -> Drawn:
        """hidden [M, d] of all requests' candidate rows, in the order of `groups`."""
        special = [g for g in groups if not g.is_greedy or g.needs_distribution]
        if not special:
            rows = self._greedy(hidden)
            return Drawn(rows.token, kernels.confidence(rows), {})
        token = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        confidence = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        top: dict[int, list[tuple[int, float]]] = {}
        drawers = (
            ([g for g in groups if g.is_greedy and not g.needs_distribution], self._draw_greedy),
            ([g for g in special if not g.needs_distribution], self._draw_noisy),
            ([g for g in special if g.needs_distribution], self._draw_distribution),
        )
        for members, drawer in drawers:
            if members:
                index = torch.cat([torch.arange(g.start, g.end) for g in members]).to(hidden.device)
                rows, alternatives = drawer(hidden[index], members)
                token[index], confidence[index] = rows.token, kernels.confidence(rows)
                top.update({int(index[i]): entries for i, entries in alternatives.items()})
        return Drawn(token, confidence, top)

    def _greedy(self, hidden: Tensor) -> Rows:
        local = kernels.head_rows(hidden.float(), self._model.head, self._offset, self._banned)
        if self._group.size == 1:
            return local
        return kernels.combine(
            [kernels.unpack(part)[1] for part in self._group.all_gather(kernels.pack(local))]
        )

    def _draw_greedy(self, hidden: Tensor, groups: list[RowGroup]) -> tuple[Rows, dict]:
        return self._greedy(hidden), {}

    def _draw_noisy(self, hidden: Tensor, groups: list[RowGroup]) -> tuple[Rows, dict]:
        logits = self._logits(hidden)
        score, local = kernels.sample_rows(logits, *_noise_keys(groups), self._offset, self._banned)
        if self._group.size == 1:
            return local, {}
        parts = [kernels.unpack(part) for part in self._group.all_gather(kernels.pack(local, score))]
        scores, rows = zip(*parts, strict=True)
        return kernels.combine(rows, scores), {}

    def _draw_distribution(self, hidden: Tensor, groups: list[RowGroup]) -> tuple[Rows, dict]:
        """Rows of the whole vocabulary on every rank: each filters and draws the same."""
        logits = self.full_logits(hidden)
        allowed = logits.clone()
        allowed[:, list(self._banned)] = -torch.inf
        top: dict[int, list[tuple[int, float]]] = {}
        at = 0
        for group in groups:
            rows = slice(at, at + group.end - group.start)
            if group.decoding.num_top:
                ranked = logits[rows].log_softmax(-1).topk(group.decoding.num_top, -1)
                for i, (values, ids) in enumerate(
                    zip(ranked.values.tolist(), ranked.indices.tolist(), strict=True)
                ):
                    top[at + i] = list(zip(ids, values, strict=True))
            if not group.is_greedy:
                allowed[rows] = _nucleus(allowed[rows], group.decoding)
            at = rows.stop
        _, drawn = kernels.sample_rows(allowed, *_noise_keys(groups))
        raw = logits.gather(1, drawn.token.clamp(min=0)[:, None])[:, 0]
        return Rows(raw, drawn.token, logits.logsumexp(-1)), top

    def _logits(self, hidden: Tensor) -> Tensor:
        """This rank's part of the logits, float32 [M, V_local]."""
        return F.linear(hidden.float(), self._model.head.float())

    def full_logits(self, hidden: Tensor) -> Tensor:
        """float32 [M, V] on every rank."""
        local = self._logits(hidden)
        if self._group.size == 1:
            return local
        padded = F.pad(local, (0, self._full_rows - local.shape[1]), value=-torch.inf)
        return torch.cat(list(self._group.all_gather(padded)), 1)[:, : self._model.config.vocab_size]


def _noise_keys(groups: list[RowGroup]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, seed, position, step of each row."""
    lengths = torch.tensor([g.end - g.start for g in groups])

    def spread(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(lengths)

    return (
        spread([g.decoding.temperature for g in groups], torch.float32),
        spread([g.decoding.seed for g in groups], torch.int64),
        torch.from_numpy(np.concatenate([g.columns for g in groups]).astype(np.int64)),
        spread([g.step for g in groups], torch.int64),
    )


def _nucleus(logits: Tensor, decoding: Decoding) -> Tensor:
    """-inf outside the top_k largest and the smallest set whose probability at the temperature reaches top_p."""
    if decoding.top_k > 0:
        smallest = logits.topk(min(decoding.top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if decoding.top_p < 1.0:
        ordered, order = (
            (logits / decoding.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        )
        outside = ordered.cumsum(-1) - ordered >= decoding.top_p  # what came before reached it already
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits
