"""Groups over NCCL: the host's part of them with a stand-in for NCCL between real processes, and on GPUs all of it.

The stand-in has NCCL's manners, as far as they differ from gloo's: it meets nobody before the first collective, and its
shutdown() waits for all ranks.
"""

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from bench.gpu import groups
from dlmserve.errors import WorkerError
from dlmserve.worker import parallel
from dlmserve.worker.parallel import GlooGroup, NcclGroup, make_group
from tests.test_parallel import (
    REPLY_LIMIT_S,
    Peer,
    crew_of,
    everyone,
    form_all,
    gather,
    leave,
    reduce,
)


class NcclStandIn:
    class Options:
        _timeout: timedelta

    num_made = 0

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        NcclStandIn.num_made += 1
        self._where = (store, rank, size, options._timeout)
        self._gloo: GlooGroup | None = None

    def _connected(self) -> Any:
        if self._gloo is None:
            self._gloo = GlooGroup(*self._where)
        return self._gloo._backend

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return self._connected().allreduce(tensors)

    def _allgather_base(self, out: torch.Tensor, t: torch.Tensor) -> Any:
        return self._connected()._allgather_base(out, t)

    def shutdown(self) -> None:
        self._connected().barrier().wait()

    def abort(self) -> None:
        self._gloo = None


class Refusing(NcclStandIn):
    aborted = False

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        raise RuntimeError("NCCL error: unhandled system error")

    def abort(self) -> None:
        Refusing.aborted = True


class Hanging(NcclStandIn):
    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        threading.Event().wait()


def form(
    state: dict, path: str, rank: int, size: int, timeout_s: float, nccl: type[NcclStandIn] = NcclStandIn
) -> int:
    parallel.dist.ProcessGroupNCCL = nccl  # type: ignore[misc]
    parallel.KINDS["cpu"] = NcclGroup
    state["group"] = make_group(path, rank, size, "cpu", timeout_s)
    return state["group"].size


@pytest.fixture(scope="module")
def crew() -> Iterator[list[Peer]]:
    with crew_of(3) as crew:
        yield crew


@pytest.fixture
def pair(crew: list[Peer]) -> list[Peer]:
    return crew[:2]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes part, over an NCCL that never connects."""
    monkeypatch.setattr(parallel.dist, "ProcessGroupNCCL", Refusing, raising=False)
    monkeypatch.setitem(parallel.KINDS, "cpu", NcclGroup)


def test_groups_are_formed_and_left_again_and_again_on_living_ranks(crew, pair, tmp_path):
    for formation, peers in enumerate((pair, crew, pair)):
        form_all(peers, tmp_path / str(formation), form=form)
        total = float(sum(range(1, len(peers) + 1)))
        assert everyone(peers, reduce, [2], torch.float32) == [[total, total]] * len(peers)
        assert [len(gathered) for gathered in everyone(peers, gather, [2, 3])] == [len(peers)] * len(peers)
        everyone(peers, leave)


def test_a_rank_that_could_not_load_leaves_without_waiting_for_its_peers(pair, tmp_path):
    form_all(pair, tmp_path / "store", form=form)
    pair[0].call(leave)
    pair[0].reply()  # within its limit: the other rank does not take part
    everyone(pair, leave)


def test_survivors_of_a_killed_peer_leave_and_form_again(pair, tmp_path):
    third = Peer()
    form_all([*pair, third], tmp_path / "three", form=form)
    for peer in pair:
        peer.call(reduce, [1000], torch.float32)
    third.process.kill()
    third.process.join()
    assert all(isinstance(peer.reply(), WorkerError) for peer in pair)
    form_all(pair, tmp_path / "two", form=form)
    assert everyone(pair, reduce, [1], torch.float32) == [[3.0]] * 2
    everyone(pair, leave)


def test_a_missing_rank_is_named_before_nccl_waits_for_it(alone, tmp_path):
    num_made = NcclStandIn.num_made
    with pytest.raises(WorkerError, match=r"rank 0 did not meet all 3 .* \(rank 1, rank 2 did not come\)"):
        make_group(str(tmp_path / "store"), 0, 3, "cpu", 0.1)
    assert NcclStandIn.num_made == num_made


def test_a_group_that_cannot_connect_is_left(alone, tmp_path):
    with pytest.raises(WorkerError, match="all_reduce failed on rank 0 of 1: NCCL error"):
        parallel.connect(str(tmp_path / "store"), 0, 1, "cpu", 1.0)
    assert Refusing.aborted


def test_a_rank_whose_peer_dies_while_nccl_connects_ends(tmp_path):
    peer = Peer()
    peer.call(form, str(tmp_path / "store"), 0, 1, 0.1)  # a group of one needs nobody
    assert peer.reply() == 1
    peer.call(connect_alone, str(tmp_path / "other"))
    peer.process.join(REPLY_LIMIT_S)
    assert peer.process.exitcode == 1


def connect_alone(state: dict, path: str) -> None:
    parallel.dist.ProcessGroupNCCL = Hanging  # type: ignore[misc]
    parallel.connect(path, 0, 1, "cpu", 0.1)


# --- on GPUs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_real_groups_are_formed_and_left_and_captured(size):
    seen = torch.cuda.device_count()
    if seen < size:
        pytest.skip(f"torch sees {seen} GPUs; this needs {size}")
    row = groups.form_and_leave("cuda", size, num_rounds=3)
    assert row["right"] and row["replayed_right"]
