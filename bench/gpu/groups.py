"""Groups of ranks, formed and left on living processes: that they are right, in a captured graph too, and how fast.

One process for each rank. On one GPU a group of one rank shows that NCCL connects, is captured and leaves; with two the
ranks meet.
"""

import os
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import torch

from bench.gpu.setup import Setting
from dlmserve.worker.device import make_device
from dlmserve.worker.parallel import BackendGroup, connect

LIMIT_S = 60.0
TIMEOUT_S = 20.0
# What a layer of LLaDA-8B exchanges for 32 tokens.
SHAPE = (32, 4096)
REPEATS = 50


def measure(setting: Setting) -> dict:
    kind = "cuda" if setting.on_gpu else "cpu"
    num_devices = torch.cuda.device_count() if setting.on_gpu else 2
    sizes = [size for size in (1, 2, 4) if size <= num_devices]
    if setting.small:
        sizes = sizes[-1:]
    return {
        "devices": num_devices,
        "rows": [form_and_leave(kind, size, setting.size(3, 2)) for size in sizes],
    }


def form_and_leave(kind: str, size: int, num_rounds: int) -> dict:
    """`kind`: "cuda" or "cpu". Of the slowest rank; the first formation counts apart, it loads NCCL."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            device = f"cuda:{rank}" if kind == "cuda" else "cpu"
            process = context.Process(target=take_part, args=(theirs, folder, rank, size, device, num_rounds))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            found = [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    times = {
        name: max(each[name] for each in found) for name in ("first_ms", "form_ms", "leave_ms", "reduce_us")
    }
    checks = {name: all(each[name] for each in found) for name in ("right", "replayed_right")}
    return {"ranks": size, "rounds": num_rounds} | times | checks


def _receive(pipe: Connection, rank: int) -> dict:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"rank {rank} did not report within {LIMIT_S:g} s; run with NCCL_DEBUG=INFO")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def take_part(pipe: Connection, folder: str, rank: int, size: int, device: str, num_rounds: int) -> None:
    try:
        pipe.send(_take_part(folder, rank, size, device, num_rounds))
    except Exception as error:
        pipe.send(error)


def _take_part(folder: str, rank: int, size: int, device: str, num_rounds: int) -> dict:
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    forms, leaves, right, replayed_right, reduces = [], [], True, True, [0.0]
    for formation in range(num_rounds):
        began_at = time.perf_counter()
        group = connect(os.path.join(folder, str(formation)), rank, size, device, TIMEOUT_S)
        make_device(device).wait()
        forms.append(time.perf_counter() - began_at)
        right &= _is_right(group, device)
        replayed, reduces = _replayed(group, device)
        replayed_right &= replayed
        began_at = time.perf_counter()
        group.close()
        leaves.append(time.perf_counter() - began_at)
    return {
        "first_ms": 1e3 * forms[0],
        "form_ms": 1e3 * median(forms[1:]),
        "leave_ms": 1e3 * median(leaves),
        "reduce_us": 1e6 * median(reduces),
        "right": right,
        "replayed_right": replayed_right,
    }


def _is_right(group: BackendGroup, device: str) -> bool:
    mine = torch.full((2, 3), group.rank + 1.0, device=device)
    ranks = torch.arange(1.0, group.size + 1, device=device)
    gathered = group.all_gather(mine)
    reduced = group.all_reduce_(mine)
    wanted = ranks[:, None, None].expand(-1, 2, 3)
    return torch.equal(gathered, wanted) and torch.equal(reduced, wanted.sum(0))


@torch.inference_mode()
def _replayed(group: BackendGroup, device: str) -> tuple[bool, list[float]]:
    """Of a collective captured as the model's are: whether its replays follow their input, and their times."""
    target = make_device(device)
    x = torch.empty(SHAPE, dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=device)
    replay = target.capture(lambda: group.all_reduce_(x.clone()))
    right, times = True, []
    for i in range(REPEATS):
        x.fill_(i % 7)
        target.wait()
        began_at = time.perf_counter()
        out = replay()
        target.wait()
        times.append(time.perf_counter() - began_at)
        right &= bool((out == group.size * (i % 7)).all())
    return right, times


def lines(result: dict) -> list[str]:
    out = [f"{'ranks':>6}{'first ms':>10}{'form ms':>9}{'leave ms':>10}{'reduce us':>11}  right"]
    for row in result["rows"]:
        right = "yes" if row["right"] and row["replayed_right"] else "NO"
        out.append(
            f"{row['ranks']:6d}{row['first_ms']:10.0f}{row['form_ms']:9.0f}{row['leave_ms']:10.1f}"
            f"{row['reduce_us']:11.1f}  {right}"
        )
    more = "" if result["devices"] > 1 else "; two ranks need two GPUs"
    return [*out, f"{result['devices']} devices{more}"]
