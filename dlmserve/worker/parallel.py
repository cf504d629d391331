"""Owns the process group of one model instance: rendezvous, the two collectives, the way they fail.

Knows nothing of models, messages or sockets. A group is a bare ProcessGroupGloo or ProcessGroupNCCL object on
a FileStore of its own, never torch's global default group: a rank forms and leaves groups again and again,
and what is left of a broken one cannot touch the next.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlmserve.errors import WorkerError

log = logging.getLogger("dlmserve.rank")


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


class BackendGroup(Group, ABC):
    """A group of several ranks over one of torch's backends, which a subclass connects and leaves."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Raises RuntimeError where not all ranks are there in time."""
        self.rank, self.size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._backend: Any = self._connect(store, timeout)

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

    def first_all_reduce(self, device: str) -> None:
        """Proves the connection. Raises WorkerError."""
        self.all_reduce_(torch.ones(1, device=device))

    def close(self) -> None:
        if self._backend is not None:
            self._leave()
            self._backend = None

    @abstractmethod
    def _connect(self, store: Any, timeout: timedelta) -> Any:
        """The backend. Raises RuntimeError."""

    @abstractmethod
    def _leave(self) -> None:
        """Ends what the backend does not end with its last reference."""

    def _failure(self, what: str, error: RuntimeError) -> WorkerError:
        return WorkerError(
            f"{what} failed on rank {self.rank} of {self.size}: {error}; a peer died or was silent for "
            f"{self._timeout_s:g} s: form the instance again"
        )


class GlooGroup(BackendGroup):
    """A collective raises within milliseconds of a peer's death, and after the timeout where a peer hangs."""

    def _connect(self, store: Any, timeout: timedelta) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs do not have its options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]  # the ranks of an instance share a node
        options._timeout = timeout
        return gloo(store, self.rank, self.size, options)

    def _leave(self) -> None:
        """It closes its connections with the last reference only."""


class NcclGroup(BackendGroup):
    """Calls only enqueue work: where a peer is dead or hung, NCCL's watchdog ends this process after the timeout."""

    def _connect(self, store: Any, timeout: timedelta) -> Any:
        self._meet(store, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    def _meet(self, store: Any, timeout: timedelta) -> None:
        """NCCL connects at the first collective, and there waits for ever for a rank that never came."""
        keys = [f"rank {rank}" for rank in range(self.size)]
        store.set(keys[self.rank], "here")
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [key for key in keys if not store.check([key])]
            raise RuntimeError(f"{', '.join(missing)} did not come") from error

    def first_all_reduce(self, device: str) -> None:
        """A peer that dies while NCCL connects would still be waited for: that ends this process, as later on."""
        with _ends_process_after(
            2 * self._timeout_s, f"rank {self.rank} of {self.size} to connect over NCCL"
        ):
            super().first_all_reduce(device)

    def _leave(self) -> None:
        """Not by shutdown(): there the ranks wait for each other, but one that could not load its weights leaves
        alone. Whoever leaves in order has waited for its device.
        """
        self._backend.abort()


@contextmanager
def _ends_process_after(seconds: float, what: str) -> Iterator[None]:
    def end() -> None:
        log.error("waited %g s for %s: a peer is gone; this process ends", seconds, what)
        os._exit(1)  # the agent starts this device's process afresh

    timer = Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


SOLO = Group()
KINDS: dict[str, type[BackendGroup]] = {"cpu": GlooGroup, "cuda": NcclGroup}


def make_group(store_path: str, rank: int, size: int, device: str, timeout_s: float) -> Group:
    """Meet the other ranks at the file `store_path` (a new one for each formation) and connect with them.

    `device` is "cpu" or "cuda:N". Raises WorkerError where not all are there after about 2 x `timeout_s`.
    """
    return SOLO if size == 1 else connect(store_path, rank, size, device, timeout_s)


def connect(store_path: str, rank: int, size: int, device: str, timeout_s: float) -> BackendGroup:
    """`make_group` for any number of ranks: one of its own, too, which shows that the backend works."""
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.FileStore(store_path, size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        group = KINDS[torch.device(device).type](store, rank, size, timeout)
    except RuntimeError as error:
        raise WorkerError(
            f"rank {rank} did not meet all {size} ranks at {store_path} within {timeout_s:g} s ({error}): "
            "did one of them die? form the instance again"
        ) from error
    try:
        group.first_all_reduce(device)
    except WorkerError:
        group.close()
        raise
    return group
