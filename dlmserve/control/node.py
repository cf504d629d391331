"""Keeps this machine's node agent running: a child process, started again with backoff when it ends.

Owns the process. Knows nothing of what the agent does or says.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

MAX_EARLY_EXITS = 3  # in a row, before the agent counts as unable to start
RETRY_S = 0.2  # wait before it is started again; doubles up to
MAX_RETRY_S = 10.0


class LocalAgent:
    """`on_exit(reason, hopeless)` is called on the loop when the process ended by itself or was killed."""

    def __init__(self, command: list[str], on_exit: Callable[[str, bool], None]) -> None:
        self._command, self._on_exit = command, on_exit
        self._process: subprocess.Popen | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._exited = asyncio.Event()
        self._stopping = False
        self._num_early_exits = 0

    def start(self) -> None:
        # A session of its own: Ctrl-C must reach the head only, which first lets running requests finish.
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._exited.clear()
        pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._reap, self._process, pidfd)

    def _reap(self, process: subprocess.Popen, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        code = process.wait()
        self._exited.set()
        if self._stopping:
            return
        wait_s = min(MAX_RETRY_S, RETRY_S * 2**self._num_early_exits)
        self._num_early_exits += 1
        self._restart = asyncio.get_running_loop().call_later(wait_s, self.start)
        self._on_exit(f"the node agent ended ({_describe(code)})", self._num_early_exits >= MAX_EARLY_EXITS)

    def greeted(self) -> None:
        """The agent runs and said so."""
        self._num_early_exits = 0

    def kill(self) -> None:
        """Its ranks die with it: each asked the kernel for that."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Waits for it to end (the caller has asked it to), then kills it. It is not started again."""
        self._stopping = True
        if self._restart:
            self._restart.cancel()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._exited.wait(), timeout_s)
        except asyncio.TimeoutError:
            self.kill()
            await self._exited.wait()


def find_device(setting: str) -> str:
    """ "auto" -> "cuda" where this machine has an NVIDIA device, else "cpu"."""
    if setting != "auto":
        return setting
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists() else "cpu"


def _describe(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
