"""Process groups between real processes: formed and left again and again, right sums, clean failures."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from dlmserve.errors import WorkerError
from dlmserve.worker.parallel import SOLO, Group, make_group

REPLY_LIMIT_S = 30  # well below PATIENT_S: whoever answers in time was not waiting for the group's timeout
PATIENT_S = 120.0


class Peer:
    """A process that waits for work; `call` returns at once, `reply` waits for the result."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dlmserve.worker.parallel"])  # imports torch once for all
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_calls, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, do: Callable, *args: object) -> None:
        self.pipe.send((do, args))

    def reply(self) -> object:
        assert self.pipe.poll(REPLY_LIMIT_S), f"no reply within {REPLY_LIMIT_S} s"
        return self.pipe.recv()


def serve_calls(pipe: Connection) -> None:
    torch.set_num_threads(1)
    state: dict = {"group": SOLO}
    while True:
        try:
            do, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(do(state, *args))
        except WorkerError as error:
            state["group"].close()
            pipe.send(error)


def form(state: dict, path: str, rank: int, size: int, timeout_s: float) -> int:
    state["group"] = make_group(path, rank, size, "cpu", timeout_s)
    return state["group"].size


def reduce(state: dict, shape: list[int], dtype: torch.dtype) -> list[float]:
    group: Group = state["group"]
    values = torch.full(shape, group.rank + 1.0, dtype=dtype)
    assert group.all_reduce_(values) is values  # in place
    return values.flatten().tolist()


def gather(state: dict, shape: list[int]) -> torch.Tensor:
    group: Group = state["group"]
    return group.all_gather(torch.full(shape, float(group.rank)).t())  # not contiguous


def leave(state: dict) -> int:
    state["group"].close()
    state["group"].close()  # twice is allowed
    return len(os.listdir("/proc/self/task"))


def count_threads(state: dict, at_most: int) -> int:
    """One that has ended, and been joined, is listed for a moment more: waits for it."""
    deadline = time.monotonic() + REPLY_LIMIT_S / 2
    while (number := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < deadline:
        os.sched_yield()
    return number


def everyone(peers: list[Peer], do: Callable, *args: object) -> list:
    for peer in peers:
        peer.call(do, *args)
    return [peer.reply() for peer in peers]


def form_all(peers: list[Peer], path: Path, timeout_s: float = PATIENT_S, form: Callable = form) -> None:
    for rank, peer in enumerate(peers):
        peer.call(form, str(path), rank, len(peers), timeout_s)
    assert [peer.reply() for peer in peers] == [len(peers)] * len(peers)


@contextmanager
def crew_of(size: int) -> Iterator[list[Peer]]:
    crew = [Peer() for _ in range(size)]
    yield crew
    for peer in crew:
        peer.process.kill()
        peer.process.join()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[Peer]]:
    with crew_of(3) as crew:
        yield crew


@pytest.fixture
def pair(peers: list[Peer]) -> list[Peer]:
    return peers[:2]


def test_a_group_of_one_needs_no_process_group(tmp_path):
    group = make_group(str(tmp_path / "unused"), 0, 1, "cpu", 1.0)
    t = torch.arange(6.0).view(2, 3)
    assert group is SOLO
    assert group.all_reduce_(t) is t
    assert torch.equal(group.all_gather(t), torch.arange(6.0).view(1, 2, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_sums_in_place(pair, tmp_path, dtype):
    form_all(pair, tmp_path / "store")
    assert everyone(pair, reduce, [2, 3], dtype) == [[3.0] * 6] * 2
    everyone(pair, leave)


@pytest.mark.parametrize("shape", [(3, 2), (4, 0)])
def test_all_gather_stacks_by_rank(pair, tmp_path, shape):
    form_all(pair, tmp_path / "store")
    rows, columns = shape
    wanted = torch.stack([torch.zeros(columns, rows), torch.ones(columns, rows)])
    for gathered in everyone(pair, gather, list(shape)):
        assert gathered.shape == wanted.shape
        assert torch.equal(gathered, wanted)
    everyone(pair, leave)


def test_groups_come_and_go_without_leaking_threads_or_files(pair, tmp_path):
    num_threads = []
    for formation in range(5):
        form_all(pair, tmp_path / f"store{formation}")
        assert everyone(pair, reduce, [1], torch.float32) == [[3.0]] * 2
        num_threads.append(max(everyone(pair, leave)))
    fewest = min(num_threads)
    assert max(everyone(pair, count_threads, fewest)) <= fewest


def test_a_killed_peer_is_an_error_at_once_and_the_survivors_form_again(peers, pair, tmp_path):
    form_all(peers, tmp_path / "three")
    for peer in pair:
        peer.call(reduce, [1000], torch.float32)  # blocked: the third rank does not take part
    peers[2].process.kill()
    errors = [peer.reply() for peer in pair]
    assert all(isinstance(error, WorkerError) for error in errors), errors
    assert "form the instance again" in str(errors[0])

    form_all(pair, tmp_path / "two")
    assert everyone(pair, reduce, [2], torch.float32) == [[3.0, 3.0]] * 2
    everyone(pair, leave)


def test_a_hung_peer_is_an_error_after_the_timeout(pair, tmp_path):
    form_all(pair, tmp_path / "store", timeout_s=0.5)
    hung = pair[1].process.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    try:
        pair[0].call(reduce, [1], torch.float32)
        error = pair[0].reply()
    finally:
        os.kill(hung, signal.SIGCONT)
    assert isinstance(error, WorkerError)
    assert "silent for 0.5 s" in str(error)
    everyone(pair, leave)


def test_a_peer_that_leaves_frees_those_that_wait_for_it(pair, tmp_path):
    form_all(pair, tmp_path / "store")
    pair[0].call(reduce, [1], torch.float32)
    pair[1].call(leave)
    assert isinstance(pair[0].reply(), WorkerError)
    pair[1].reply()


def test_a_rank_alone_at_the_rendezvous_says_who_is_missing(tmp_path):
    with pytest.raises(WorkerError, match="rank 0 did not meet all 2 ranks"):
        make_group(str(tmp_path / "store"), 0, 2, "cpu", 0.1)
