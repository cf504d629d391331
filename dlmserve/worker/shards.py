"""What a rank keeps of its weights from one formation to the next: a regroup reads only what is missing.

Going from TP 1 to TP 2 a rank already has all that it needs; going back it reads the other half. Knows names,
ranges and tensors; nothing of models, files or instances. Nothing is held twice: a shard is a view of what the
last model computed with, and each is let go when the next model has taken it.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from dlmserve.worker.weights import Ask, Weights


class Shard(NamedTuple):
    """`take` gives the tensor that `ask` once was answered with."""

    ask: Ask
    take: Callable[[], Tensor]


class KeptShards:
    """`model` is whatever tells checkpoints and formats apart; shards of another model are of no use."""

    def __init__(self) -> None:
        self._model: object = None
        self._shards: dict[tuple[str, int], Shard] = {}

    def keep(self, model: object, shards: Iterable[Shard]) -> None:
        self._model, self._shards = model, {_key(shard.ask): shard for shard in shards}

    def over(self, model: object, files: Weights) -> "KeptFirst":
        """A source of `model`'s tensors; whatever it does not hand out is let go with it."""
        shards, self._shards = self._shards, {}
        return KeptFirst(shards if model == self._model else {}, files)


class KeptFirst:
    """Weights from the kept shards, and from the files what those do not cover."""

    def __init__(self, shards: dict[tuple[str, int], Shard], files: Weights) -> None:
        self._shards, self._files = shards, files
        self.num_bytes_read = 0

    def get(self, ask: Ask) -> Tensor:
        shard = self._shards.pop(_key(ask), None)
        if shard is None or shard.ask.shape != ask.shape or shard.ask.dim != ask.dim:
            return self._read(ask)
        if ask.dim is None:
            return shard.take()
        start, stop = max(ask.start, shard.ask.start), min(ask.stop, shard.ask.stop)
        if start >= stop:
            return self._read(ask)
        whole = shard.take()
        have = whole.narrow(ask.dim, start - shard.ask.start, stop - start)
        if have.numel() < whole.numel():
            have = have.clone()  # a view would keep the rest in memory
        parts = [have]
        if ask.start < start:
            parts.insert(0, self._read(ask._replace(stop=start)))
        if stop < ask.stop:
            parts.append(self._read(ask._replace(start=stop)))
        return torch.cat(parts, ask.dim) if len(parts) > 1 else have

    def _read(self, ask: Ask) -> Tensor:
        tensor = self._files.get(ask)
        self.num_bytes_read += tensor.nbytes
        return tensor


def _key(ask: Ask) -> tuple[str, int]:
    return ask.name, ask.part
