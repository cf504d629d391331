"""Measures how long steps take, on the engine that serves: batches of made-up requests, spans mixed.

Owns which batches are measured and how. Every block of such a request takes two steps, a recompute step and
a cache step with half of the block unmasked; where half of the requests start one step later, every step
mixes both kinds. Knows nothing of who uses the times (`profiles.py` keeps them).
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from dlmserve import profiles
from dlmserve.checkpoint import ModelInfo, read_model_info
from dlmserve.messages import Admit, Command, Decoding, Form
from dlmserve.profiles import Points, ProfileKey
from dlmserve.worker.parallel import Group
from dlmserve.worker.step_loop import StepResult

QUICK_S = 2.0  # after which a measurement during start-up takes no larger batch on
QUICK_REQUESTS = 16
QUICK_LENGTH = 160
PROMPT_TOKEN = 0  # any: how long a step takes does not depend on the text

log = logging.getLogger("dlmserve.profiler")


class Steps(Protocol):
    """An engine, or an instance of several ranks that is stepped as one."""

    def apply(self, command: Command) -> None: ...
    def step(self) -> StepResult: ...


class Batch(NamedTuple):
    """`length`: tokens of each canvas; `num_blocks` of them are output. `mixed`: half start a step later."""

    num_requests: int
    length: int
    num_blocks: int
    mixed: bool


def quick_grid(max_len: int, max_requests: int, block_length: int) -> list[Batch]:
    """Small batches of short canvases."""
    length = min(max_len, max(QUICK_LENGTH, 2 * block_length))
    return _grid([length], min(max_requests, QUICK_REQUESTS), 2, block_length)


def full_grid(lengths: Sequence[int], max_requests: int, block_length: int) -> list[Batch]:
    return _grid(lengths, max_requests, 4, block_length)


def _grid(lengths: Sequence[int], max_requests: int, num_blocks: int, block_length: int) -> list[Batch]:
    counts = [1 << i for i in range(max_requests.bit_length()) if 1 << i <= max_requests]
    return [
        Batch(count, length, max(1, min(num_blocks, (length - 1) // block_length)), mixed)
        for count in counts
        for length in lengths
        for mixed in (False, True)
        if count > 1 or not mixed
    ]


def measure(
    steps: Steps,
    grid: Sequence[Batch],
    mask_id: int,
    decoding: Decoding,
    agree: Callable[[float], float] = lambda spent_s: spent_s,
    limit_s: float = float("inf"),
) -> Iterator[Points]:
    """The times after each batch of the grid: the shortest by (packed tokens, requests).

    The shortest, because others on the machine only ever make a step longer; what they do in the long run is
    learnt from StepReports. Ends early at the limit, or where the KV pages do not hold a batch. `agree`: the
    same number on all ranks, of this rank's: they must take the same steps.
    """
    samples: dict[tuple[int, int], list[float]] = {}
    _run(steps, grid[0], mask_id, decoding)  # what happens once only is not to be measured
    began_at = time.perf_counter()
    for batch in grid:
        if agree(time.perf_counter() - began_at) > limit_s:
            return
        for num_tokens, num_requests, seconds in _run(steps, batch, mask_id, decoding):
            samples.setdefault((num_tokens, num_requests), []).append(seconds)
        yield [(*size, min(times)) for size, times in sorted(samples.items())]


def made_up(info: ModelInfo, max_len: int) -> Decoding:
    """How the requests of a measurement are decoded: two steps a block."""
    block_length = usable_block_length(info.default_block_length, max_len)
    return Decoding(block_length, rule="steps", value=2.0, ignore_eos=True, block_causal=info.block_causal)


def _run(steps: Steps, batch: Batch, mask_id: int, decoding: Decoding) -> Points:
    """Every step of the batch from the first to the last block."""
    output = batch.num_blocks * decoding.block_length
    canvas = [PROMPT_TOKEN] * (batch.length - output) + [mask_id] * output
    late = [i for i in range(batch.num_requests) if batch.mixed and i % 2]
    for i in sorted(set(range(batch.num_requests)) - set(late)):
        steps.apply(Admit(i, canvas, batch.length - output, batch.length, batch.length, decoding))
    found: Points = []
    num_running = batch.num_requests
    while num_running:
        began_at = time.perf_counter()
        result = steps.step()
        found.append((result.num_tokens, len(result.requests), time.perf_counter() - began_at))
        for i in late:
            steps.apply(Admit(i, canvas, batch.length - output, batch.length, batch.length, decoding))
        late = []
        num_running -= len(result.failed) + sum(step.finished != "" for step in result.requests)
    return [point for point in found if point[1]]


# ---- at an instance's start


def step_times(form: Form, device: str, group: Group, engine: Steps, may_measure: bool) -> tuple[Points, str]:
    """This instance's step times and where they are from: the user's cache, or a quick measurement now.

    Collective: all ranks measure where one of them finds nothing in the cache and all of them may. Without
    any the scheduler starts from what it believes of other TP degrees.
    """
    key = key_of(form, device)

    def mean(value: float) -> float:
        return float(group.all_reduce_(torch.tensor([value], device=device))) / group.size

    points = profiles.load(key)
    if mean(not points) == 0 and points:
        return points, f"from {key.path}: {_ends(points)}"
    if mean(may_measure) < 1:
        return [], "not measured"
    began_at = time.perf_counter()
    info = read_model_info(form.model.path)
    decoding = made_up(info, form.max_model_len)
    grid = quick_grid(form.max_model_len, form.max_num_seqs, decoding.block_length)
    points = list(measure(engine, grid, form.model.mask_id, decoding, mean, QUICK_S))[-1]
    if group.rank == 0 and points:
        _keep(key, points)
    return points, f"measured in {time.perf_counter() - began_at:.1f} s: {_ends(points)}"


def _ends(points: Points) -> str:
    """The smallest and the largest batch."""
    ends = [f"{num_tokens} tokens {1e3 * seconds:.1f} ms" for num_tokens, _, seconds in points]
    return " to ".join([*ends[:1], *ends[1:][-1:]])


def _keep(key: ProfileKey, points: Points) -> None:
    try:
        profiles.save(key, points, "quick")
    except OSError as error:
        log.warning("step times are not kept for the next start: %s", error)


def usable_block_length(wanted: int, max_len: int) -> int:
    """A made-up canvas holds a token of prompt and a block at least."""
    return max(1, min(wanted, max_len - 1))


def key_of(form: Form, device: str) -> ProfileKey:
    return ProfileKey(
        form.model.path,
        form.model.load_format,
        device_name(device),
        form.model.dtype,
        torch.get_num_threads() if device == "cpu" else 1,
        form.tp_degree,
    )


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "cpu")
