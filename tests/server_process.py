"""A real `python -m dlmserve` on a free port, its clients, and the processes below it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.request import urlopen

import openai

from bench.processes import command_line, with_descendants

LIMIT_S = 60.0  # for anything that is waited for: far above what it takes, so that only a hang meets it


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Polls until something holds that another process does."""
    end_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_at, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


class Server:
    """Serves when the constructor returns; everything that it logged is in `lines`.

    A context manager: what still runs at its end is killed.
    """

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "dlmserve", "--port", "0", "--device", "cpu", *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.lines: list[str] = []
        self.url = ""
        self._serving = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._serving.wait(LIMIT_S) or not self.url:
            self.process.kill()
            raise AssertionError("the server does not serve: " + "".join(self.lines))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"serving .* on (http://\S+)", line):
                self.url = match[1]
            if "try: curl" in line:
                self._serving.set()
        self._serving.set()  # it ended

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
        ) as client:
            yield client

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=LIMIT_S) as response:
            return response.read().decode()

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = [
            line for line in self.get("/metrics").splitlines() if re.match(rf"dlmserve_{name}[ {{]", line)
        ]
        assert lines, f"no metric dlmserve_{name}"
        return sum(float(line.split()[-1]) for line in lines)

    def descendants(self) -> set[int]:
        """Processes below the server's, by parent."""
        return with_descendants([self.process.pid]) - {self.process.pid}

    def ranks(self) -> list[int]:
        devices = json.loads(self.get("/v1/cluster"))["devices"]
        return sorted(each["pid"] for each in devices if each["state"] != "down")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def alive(pids: set[int]) -> set[int]:
    """Those of the processes that still run dlmserve."""
    return {pid for pid in pids if "dlmserve" in command_line(pid)}


async def gather(*work) -> list:  # noqa: ANN002  (coroutines)
    return list(await asyncio.wait_for(asyncio.gather(*work), LIMIT_S))
