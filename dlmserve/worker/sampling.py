"""From hidden states of masked positions to (token, confidence) for each, over all ranks of the instance.

Greedy rows take the fused path: hidden states against this rank's vocabulary rows, and the ranks exchange the best
logit, its token and the log of the sum of exponentials. Rows with a temperature draw by Gumbel-max with noise keyed
by (seed, position, step, token id): the same token in any batch and at any TP degree. Rows that need the whole
distribution (top-p, top-k, logprobs) gather it. The mask token is never an answer: it is excluded from the arg-max
and stays in the sum, as the public samplers' softmax has it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels
from dlmserve.kernels import Rows
from dlmserve.messages import Decoding
from dlmserve.worker.models.decoder import Decoder

# Tensors of a chunk's size that filtering and ranking whole rows keep at a time, about.
_COPIES = 4


class NoiseKeys(NamedTuple):
    """What a row is drawn by, in the order in which `kernels.sample_rows` takes it; [rows] each."""

    temperature: Tensor
    seed: Tensor
    position: Tensor
    step: Tensor

    def part(self, rows: slice) -> "NoiseKeys":
        return NoiseKeys(*(key[rows] for key in self))


class RowGroup(NamedTuple):
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
class Top:
    """The best tokens of consecutive rows from `start` on: log probabilities f32 and ids i64, [rows, num_top]."""

    start: int
    values: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Drawn:
    """parts f32 [tp, 4, M]: what each rank found for each row, see kernels.pack; the same on all ranks."""

    parts: Tensor
    top: list[Top]


class Sampler:
    """Draws for the shard of one rank; `draw` and `full_logits` are collective over the model's group."""

    def __init__(self, model: Decoder, mask_id: int) -> None:
        self._model, self._group = model, model.group
        self._banned = (mask_id,)
        self._offset = model.shard.vocab[0]
        self._full_rows = -(-model.config.vocab_size // self._group.size)  # vocabulary rows of a full shard
        # The same on all ranks: what gathers whole rows is collective.
        self._rows_at_once = kernels.rows_at_once(model.config.vocab_size)

    @staticmethod
    def arrays(groups: list[RowGroup]) -> dict[str, np.ndarray]:
        """What `draw` needs on the device: nothing where all rows are greedy, and no groups need be given."""
        arrays: dict[str, np.ndarray] = {}
        for kind, members in _by_kind(groups).items():
            if kind == "greedy" and len(members) == len(groups):
                continue
            arrays[f"{kind}.rows"] = np.concatenate([np.arange(g.start, g.end) for g in members])
            if kind != "greedy":
                arrays |= {f"{kind}.{name}": key for name, key in _noise_keys(members).items()}
        return arrays

    def draw(self, hidden: Tensor, groups: list[RowGroup], index: dict[str, Tensor]) -> Drawn:
        """hidden [M, d] of all requests' candidate rows, in the order of `groups`; index: `arrays` on the device."""
        kinds = _by_kind(groups)
        if kinds.keys() <= {"greedy"}:
            return Drawn(self.greedy(hidden), [])
        parts = torch.empty(self._group.size, kernels.NUM_PLANES, len(hidden), device=hidden.device)
        top: list[Top] = []
        for kind, members in kinds.items():
            places = index[f"{kind}.rows"]
            mine = hidden[places]
            if kind == "greedy":
                parts[:, :, places] = self.greedy(mine)
                continue
            keys = NoiseKeys(*(index[f"{kind}.{name}"] for name in NoiseKeys._fields))
            if kind == "noisy":
                parts[:, :, places] = self._draw_noisy(mine, keys)
            else:
                rows, more = self._draw_distribution(mine, members, keys)
                parts[:, :, places] = kernels.pack_whole(rows, self._group.size)
                top += more
        return Drawn(parts, top)

    def greedy(self, hidden: Tensor) -> Tensor:
        """The most probable token of each row of hidden [M, d], as parts."""
        local = kernels.head_rows(hidden, self._model.head, self._offset, self._banned)
        return self._group.all_gather(kernels.pack(local))

    def _draw_noisy(self, hidden: Tensor, keys: NoiseKeys) -> Tensor:
        parts = []
        for start in range(0, len(hidden), self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            logits = kernels.logits(hidden[rows], self._model.head)
            score, local = kernels.sample_rows(logits, *keys.part(rows), self._offset, self._banned)
            parts.append(kernels.pack(local, score))
        return self._group.all_gather(torch.cat(parts, 1))

    def _draw_distribution(
        self, hidden: Tensor, groups: list[RowGroup], keys: NoiseKeys
    ) -> tuple[Rows, list[Top]]:
        """Rows of the whole vocabulary on every rank: each filters and draws the same."""
        drawn, top = [], list[Top]()
        start = 0
        for members in _in_chunks(groups, max(1, self._rows_at_once // _COPIES)):
            rows = slice(start, start + sum(group.end - group.start for group in members))
            more = self._draw_chunk(hidden[rows], members, keys.part(rows))
            drawn.append(more[0])
            top += more[1]
            start = rows.stop
        return Rows(*map(torch.cat, zip(*drawn, strict=True))), top

    def _draw_chunk(self, hidden: Tensor, groups: list[RowGroup], keys: NoiseKeys) -> tuple[Rows, list[Top]]:
        logits = self.full_logits(hidden)
        allowed = logits.clone()
        for token in self._banned:
            allowed[:, token] = -torch.inf
        top: list[Top] = []
        at = 0
        for group in groups:
            rows = slice(at, at + group.end - group.start)
            if group.decoding.num_top:
                ranked = logits[rows].log_softmax(-1).topk(group.decoding.num_top, -1)
                top.append(Top(group.start, ranked.values, ranked.indices))
            if not group.is_greedy:
                allowed[rows] = _nucleus(allowed[rows], group.decoding)
            at = rows.stop
        _, drawn = kernels.sample_rows(allowed, *keys)
        raw = logits.gather(1, drawn.token.clamp(min=0)[:, None])[:, 0]
        return Rows(raw, drawn.token, logits.logsumexp(-1)), top

    def full_logits(self, hidden: Tensor) -> Tensor:
        """float32 [M, V] on every rank."""
        local = kernels.logits(hidden, self._model.head)
        if self._group.size == 1:
            return local
        padded = F.pad(local, (0, self._full_rows - local.shape[1]), value=-torch.inf)
        return torch.cat(list(self._group.all_gather(padded)), 1)[:, : self._model.config.vocab_size]


def _by_kind(groups: list[RowGroup]) -> dict[Literal["greedy", "noisy", "distribution"], list[RowGroup]]:
    """Which of the three ways each request's rows are drawn; ways that nobody takes are absent."""
    kinds: dict = {}
    for group in groups:
        kind = "distribution" if group.needs_distribution else "greedy" if group.is_greedy else "noisy"
        kinds.setdefault(kind, []).append(group)
    return kinds


def _in_chunks(groups: list[RowGroup], num_rows: int) -> Iterator[list[RowGroup]]:
    """Neighbours with at most `num_rows` rows together, or one that has more."""
    chunk: list[RowGroup] = []
    size = 0
    for group in groups:
        length = group.end - group.start
        if chunk and size + length > num_rows:
            yield chunk
            chunk, size = [], 0
        chunk.append(group)
        size += length
    if chunk:
        yield chunk


def _noise_keys(groups: list[RowGroup]) -> dict[str, np.ndarray]:
    """What `kernels.sample_rows` draws by, of each row."""
    lengths = [g.end - g.start for g in groups]
    return {
        "temperature": np.repeat(np.array([g.decoding.temperature for g in groups], np.float32), lengths),
        "seed": np.repeat(np.array([g.decoding.seed for g in groups], np.int64), lengths),
        "position": np.concatenate([g.columns for g in groups]).astype(np.int64),
        "step": np.repeat(np.array([g.step for g in groups], np.int64), lengths),
    }


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
