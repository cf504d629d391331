"""A rank keeps its weights between formations: the same tensors as from the files, and only what is missing is read."""

import pytest
import torch

from dlmserve.checkpoint import ModelInfo, read_model_info, resolve
from dlmserve.messages import Form, ModelSpec
from dlmserve.worker.build import build_engine
from dlmserve.worker.engine import Engine
from dlmserve.worker.parallel import Group
from dlmserve.worker.shards import KeptShards
from dlmserve.worker.weights import Ask

TINY = read_model_info(resolve("tiny"))


class Alone(Group):
    """One rank of a group whose others are not there: enough to load weights, not to compute."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t] * self.size)


def spec(dtype: str = "float32", info: ModelInfo = TINY) -> ModelSpec:
    return ModelSpec(info.path, "auto", dtype, info.mask_id, list(info.eos_ids))


def build(
    rank: int, size: int, kept: KeptShards | None = None, dtype: str = "float32", info: ModelInfo = TINY
) -> Engine:
    form = Form("i", rank, size, [], "", spec(dtype, info), 64, 1, 2, 32, 10.0)
    return build_engine(form, "cpu", Alone(rank, size), kept)


def tensors(engine: Engine) -> dict[Ask, torch.Tensor]:
    return {shard.ask: shard.take() for shard in engine.shards()}


def regroup(engine: Engine, rank: int, size: int, info: ModelInfo = TINY) -> Engine:
    kept = KeptShards()
    kept.keep(spec(info=info), engine.shards())
    return build(rank, size, kept, info=info)


@pytest.mark.parametrize(
    ("before", "after", "share_read"),
    [
        ((0, 1), (0, 1), 0.0),
        ((0, 1), (1, 2), 0.0),
        ((1, 2), (2, 4), 0.0),
        ((0, 2), (0, 1), 0.5),
        ((1, 2), (0, 1), 0.5),
        ((0, 2), (1, 2), 1.0),
        ((3, 4), (0, 1), 0.75),
    ],
)
def test_a_regrouped_rank_has_what_the_files_say_and_reads_what_it_lacks(before, after, share_read) -> None:
    old = build(*before)
    new, fresh = regroup(old, *after), build(*after)
    wanted = tensors(fresh)
    found = tensors(new)
    assert found.keys() == wanted.keys()
    for ask, tensor in wanted.items():
        assert torch.equal(found[ask], tensor), ask.name
    assert new.num_bytes_read == pytest.approx(share_read * fresh.num_bytes_read, rel=0.02)


def test_another_model_is_read_anew() -> None:
    old = build(0, 1)
    kept = KeptShards()
    kept.keep(spec(), old.shards())
    other = build(0, 1, kept, dtype="bfloat16")
    assert other.num_bytes_read == build(0, 1, dtype="bfloat16").num_bytes_read > 0
