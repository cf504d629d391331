"""The processes of the chaos run: a head with its own ranks and a node that joined over TCP with keys, on loopback.

Starts them, finds them, counts what is left of them. The model is the embedded one with NaN in the embedding of
a token that no text has: a request that names it has logits that are not finite, and no other one does.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import torch
from safetensors.torch import load_file, save_file

from bench.processes import command_line, with_descendants
from dlmserve.checkpoint import resolve

POISON = 1087  # the last row of the embedding
ADMIN_KEY = "chaos"
START_LIMIT_S = 120.0
Process = tuple[int, str]  # pid, start time: a pid may come again


def poisoned_model(folder: Path) -> str:
    target = folder / "model"
    shutil.copytree(resolve("tiny"), target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["model.transformer.wte.weight"][POISON] = torch.nan
    save_file(tensors, path)
    return str(target)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Cluster:
    """`seen` collects every process that ever belonged to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = f"http://127.0.0.1:{free_port()}"
        self.nodes_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.seen: set[Process] = set()
        self._model = poisoned_model(folder)
        self._log = (folder / "log.txt").open("ab")
        self._run("keygen", str(folder)).wait()
        self.head = self.start_head()
        self.node = self.start_node()

    def start_head(self) -> subprocess.Popen:
        flags = ["--model", self._model, "--served-model-name", "tiny", "--device", "cpu", "--devices", "2"]
        flags += ["--port", self.base.rpartition(":")[2], "--listen", self.nodes_endpoint]
        flags += ["--keys", str(self.folder / "head.key"), "--admin-key", ADMIN_KEY, "--tp-layout", "1,1,1"]
        flags += ["--heartbeat-timeout-s", "4", "--step-timeout-s", "8", "--max-queue", "48"]
        flags += ["--reconfigure-every", "3600"]  # for the planner process: the storm changes the layout
        return self._run(*flags)

    def start_node(self) -> subprocess.Popen:
        flags = ["--name", "b", "--devices", "1", "--device", "cpu", "--keys", str(self.folder / "node.key")]
        return self._run("join", self.nodes_endpoint, *flags)

    def _run(self, *flags: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dlmserve", *flags]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env=env)

    # ---- what there is

    def processes(self) -> dict[int, str]:
        """Command line by pid, of all that run now."""
        running = {
            pid: line
            for pid in with_descendants((self.head.pid, self.node.pid))
            if (line := command_line(pid))
        }
        self.seen |= {(pid, started(pid)) for pid in running}
        return running

    def pids_of(self, module: str) -> list[int]:
        return [pid for pid, line in self.processes().items() if module in line]

    async def ranks(self, node: str) -> list[int]:
        """Those that the head knows of, by their pids."""
        devices = (await self.describe())["devices"]
        return sorted(each["pid"] for each in devices if each["node"] == node and each["state"] != "down")

    def left_over(self) -> list[str]:
        """Processes that outlive both the head and the node."""
        return [command_line(pid) for pid, since in self.seen if command_line(pid) and started(pid) == since]

    async def describe(self) -> dict:
        """GET /v1/cluster; {} where nobody answers."""
        try:
            limit = aiohttp.ClientTimeout(total=5)
            async with aiohttp.request("GET", f"{self.base}/v1/cluster", timeout=limit) as response:
                return await response.json()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return {}

    async def want(self, layout: list[int]) -> int:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.base}/v1/cluster/layout"
        async with aiohttp.request("POST", url, json={"layout": layout}, headers=headers) as response:
            return response.status

    async def until_whole(self, limit_s: float = START_LIMIT_S) -> dict:
        """Returns when every wanted instance serves. Raises TimeoutError."""
        end_at = time.monotonic() + limit_s
        while not is_whole(state := await self.describe()):
            if time.monotonic() > end_at:
                raise TimeoutError(f"not whole after {limit_s:g} s: {state}")
            await asyncio.sleep(0.1)
        self.processes()
        return state

    def stop(self) -> tuple[int, int]:
        """Exit statuses of head and node after SIGTERM."""
        self.processes()
        for process in (self.node, self.head):
            process.send_signal(signal.SIGTERM)
        return self.head.wait(60), self.node.wait(60)


def is_whole(state: dict) -> bool:
    instances = state.get("instances", [])
    degrees = sorted(each["tp_degree"] for each in instances if each["state"] == "serving")
    return bool(state) and degrees == sorted(state["layout"]) and not state["changing"]


def started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
