"""Owns the process group of one model instance: rendezvous, the two collectives, the way they fail.

Knows nothing of models, messages or sockets. A group is a bare ProcessGroupGloo or ProcessGroupNCCL object on
a FileStore of its own, never torch's global default group: a rank forms and leaves groups again and again,
and what is left of a broken one cannot touch the next.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlmserve.errors import WorkerError


class Group:
    """A group of one rank: each collective is the identity."""

    rank = 0
    size = 1

    def all_reduce_(self, t: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `t`. Raises WorkerError where a peer is dead or hung."""
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        """[size, *t.shape], by rank. Raises WorkerError where a peer is dead or hung."""
        return t.unsqueeze(0)

    def close(self) -> None:
        """Leave the group; may be called twice. Peers that wait in a gloo collective raise at once."""


class BackendGroup(Group):
    """A group of several ranks over one of torch's backends.

    With gloo a collective raises within milliseconds of a peer's death, and after the timeout where a peer
    hangs. NCCL calls only enqueue work: there NCCL's watchdog ends this process after the timeout.
    """

    def __init__(self, backend: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._backend: Any = backend

    def all_reduce_(self, t: Tensor) -> Tensor:
        try:
            self._backend.allreduce([t]).wait()
        except RuntimeError as error:
            raise self._failure("all_reduce", error) from error
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        gathered = t.new_empty(self.size * t.numel())
        try:
            self._backend._allgather_base(gathered, t.reshape(-1)).wait()
        except RuntimeError as error:
            raise self._failure("all_gather", error) from error
        return gathered.view(self.size, *t.shape)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()  # ends NCCL's threads
            self._backend = None  # gloo closes its connections with the last reference only

    def _failure(self, what: str, error: RuntimeError) -> WorkerError:
        return WorkerError(
            f"{what} failed on rank {self.rank} of {self.size}: {error}; a peer died or was silent for "
            f"{self._timeout_s:g} s: form the instance again"
        )


SOLO = Group()


def make_group(store_path: str, rank: int, size: int, device: str, timeout_s: float) -> Group:
    """Meet the other ranks at the file `store_path` (a new one for each formation) and connect with them.

    `device` is "cpu" or "cuda:N". Raises WorkerError where not all are there after about 2 x `timeout_s`.
    """
    if size == 1:
        return SOLO
    timeout = timedelta(seconds=timeout_s)
    connect = _connect_gloo if device == "cpu" else _connect_nccl
    try:
        store = dist.FileStore(store_path, size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        group = BackendGroup(connect(store, rank, size, timeout), rank, size, timeout_s)
    except RuntimeError as error:
        raise WorkerError(
            f"rank {rank} did not meet all {size} ranks at {store_path} within {timeout_s:g} s ({error}): "
            "did one of them die? form the instance again"
        ) from error
    group.all_reduce_(torch.ones(1, device=device))  # NCCL connects only now, at its first collective
    return group


def _connect_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs do not have its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # the ranks of an instance share a node
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _connect_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
