"""The CUDA back end: the functions of reference.py and step.py as launches of the kernels of csrc/*.cu.

Owns the grids, the scratch memory and the structs that kernels take by value. Knows nothing of how a launch comes
about: the driver does it on a GPU, and the tests run the same kernels on the CPU. Nothing here waits for the
device, except `select`, which checks its arguments. Arguments are checked by the package's public functions.
"""

from collections.abc import Sequence
from ctypes import Structure, c_int, c_int64, c_uint32, c_void_p
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dlmserve.kernels import chunked
from dlmserve.kernels.driver import Argument, Driver
from dlmserve.kernels.reference import THRESHOLD, Rows, bad_request
from dlmserve.kernels.step import StepOutcome

NUM_THREADS = 256  # of a block; csrc/device.cuh has room for no more
STEP_THREADS = 128  # a request has rarely more rows
VECTOR = 8  # logits that a thread takes at a time
ROW_BYTES = 32  # of the kernels' struct Row
MAX_BANNED = 32
# Blocks that a device can take at once, for each of its processors, and the least work that pays for one.
BLOCKS_PER_PROCESSOR = 8
LEAST_STRETCH = 4096


class Launch(Protocol):
    """Runs a kernel on the current stream."""

    def __call__(
        self, kernel: str, grid: tuple[int, int], num_threads: int, arguments: Sequence[Argument]
    ) -> None: ...


class Banned(Structure):
    _fields_ = (("num", c_int), ("ids", c_int * MAX_BANNED))


class Logits(Structure):
    _fields_ = (
        ("data", c_void_p), ("stride", c_int64), ("num_tokens", c_int), ("stretch", c_int),
        ("token_offset", c_uint32),
    )  # fmt: skip


class Keys(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("temperature", "seed", "position", "step"))


class RowsOut(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("score", "logit", "second", "token", "lse"))


class Requests(Structure):
    _fields_ = (("offsets", c_void_p), ("rule", c_void_p), ("value", c_void_p), ("num_rows", c_int64))


class Scratch(Structure):
    _fields_ = (("ranked", c_void_p), ("rank", c_void_p))


class Outcome(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("token", "confidence", "statistics", "num_left", "unmask"))


class Reduced(NamedTuple):
    """Rows, the score that ranks slices, and the second largest logit of greedy rows; each [M]."""

    score: Tensor
    rows: Rows
    second: Tensor


class CudaKernels:
    """The kernels of one device with `num_processors` multiprocessors and `memory_bytes` of memory."""

    def __init__(self, launch: Launch, num_processors: int, memory_bytes: int) -> None:
        self._launch = launch
        self._num_processors, self._memory_bytes = num_processors, memory_bytes

    def head_rows(
        self,
        hidden: Tensor,
        weight: Tensor,
        token_offset: int = 0,
        banned: Sequence[int] = (),
        bias: Tensor | None = None,
    ) -> Rows:
        """As in reference.py, in chunks of rows whose logits fit the device."""
        return chunked.head_rows(
            hidden, weight, token_offset, banned, bias, self.logit_rows, self._memory_bytes
        )

    def logit_rows(self, logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Rows:
        """As in reference.py; logits f32 or bf16."""
        return self._reduce("best", logits, Keys(), token_offset, banned).rows

    def top2_logits(self, logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Tensor:
        """As in reference.py; logits f32 or bf16."""
        reduced = self._reduce("best", logits, Keys(), token_offset, banned)
        return torch.stack((reduced.rows.logit, reduced.second), 1)

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        seed: Tensor,
        position: Tensor,
        step: Tensor,
        token_offset: int = 0,
        banned: Sequence[int] = (),
    ) -> tuple[Tensor, Rows]:
        """As in reference.py; logits f32 or bf16."""
        keys = [key.contiguous() for key in (temperature, seed, position, step)]
        reduced = self._reduce("draw", logits, Keys(*map(_pointer, keys)), token_offset, banned)
        return reduced.score, reduced.rows

    def select(self, confidence: Tensor, offsets: Tensor, rule: Tensor, value: Tensor) -> Tensor:
        """As in reference.py. Waits for the device, to check offsets and rule."""
        _check_requests(offsets, rule, len(confidence))
        confidence, offsets, rule, value = (x.contiguous() for x in (confidence, offsets, rule, value))
        unmask = torch.empty_like(confidence, dtype=torch.bool)
        requests, scratch, _memory = _requests(offsets, rule, value, len(confidence))
        arguments = (c_void_p(_pointer(confidence)), requests, scratch, c_void_p(_pointer(unmask)))
        if len(rule):
            self._launch("select_rows", (len(rule), 1), STEP_THREADS, arguments)
        return unmask

    def unmask_step(
        self, parts: Tensor, offsets: Tensor, rule: Tensor, value: Tensor, position: Tensor, canvas: Tensor
    ) -> StepOutcome:
        """As in step.py, in one launch that waits for nothing. `canvas` must be contiguous: it is written."""
        parts, offsets, rule, value, position = (
            x.contiguous() for x in (parts, offsets, rule, value, position)
        )
        outcome = StepOutcome.empty(len(position), len(rule), parts.device)
        requests, scratch, _memory = _requests(offsets, rule, value, len(position))
        arguments = (
            c_void_p(_pointer(parts)),
            c_int(len(parts)),
            requests,
            c_void_p(_pointer(position)),
            c_void_p(_pointer(canvas)),
            scratch,
            _outcome(outcome),
        )
        if len(rule):
            self._launch("unmask_step", (len(rule), 1), STEP_THREADS, arguments)
        return outcome

    def _reduce(
        self, kind: str, logits: Tensor, keys: Keys, token_offset: int, banned: Sequence[int]
    ) -> Reduced:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        num_rows, num_tokens = logits.shape
        reduced = _empty(num_rows, logits.device)
        if num_rows == 0:
            return reduced
        stretch, num_parts = self._stretch(num_rows, num_tokens)
        parts = torch.empty((num_parts, num_rows, ROW_BYTES), dtype=torch.uint8, device=logits.device)
        matrix = Logits(_pointer(logits), logits.stride(0), num_tokens, stretch, token_offset)
        dtype = "bf16" if logits.dtype == torch.bfloat16 else "f32"
        self._launch(
            f"{kind}_rows_{dtype}",
            (num_rows, num_parts),
            _num_threads(-(-stretch // VECTOR)),
            (matrix, _banned(tuple(banned), token_offset), keys, c_void_p(_pointer(parts))),
        )
        num_threads = _num_threads(num_rows)
        self._launch(
            "merge_rows",
            (-(-num_rows // num_threads), 1),
            num_threads,
            (
                c_void_p(_pointer(parts)),
                c_int(num_parts),
                c_int64(num_rows),
                c_int64(token_offset),
                _rows_out(reduced),
            ),
        )
        return reduced

    def _stretch(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """(tokens of a block, blocks of a row), so that few rows, too, fill the device."""
        wanted = -(-self._num_processors * BLOCKS_PER_PROCESSOR // num_rows)
        num_parts = max(1, min(wanted, num_tokens // LEAST_STRETCH))
        stretch = max(VECTOR, -(-num_tokens // (num_parts * VECTOR)) * VECTOR)
        return stretch, max(1, -(-num_tokens // stretch))


def _num_threads(work: int) -> int:
    """Whole warps, no more than have something to do."""
    return min(NUM_THREADS, max(32, -(-work // 32) * 32))


def _pointer(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _empty(num_rows: int, device: torch.device) -> Reduced:
    score, logit, second, lse = torch.empty((4, num_rows), device=device).unbind()
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    return Reduced(score, Rows(logit, token, lse), second)


def _rows_out(reduced: Reduced) -> RowsOut:
    rows = reduced.rows
    return RowsOut(*map(_pointer, (reduced.score, rows.logit, reduced.second, rows.token, rows.lse)))


@lru_cache(maxsize=64)
def _banned(banned: tuple[int, ...], token_offset: int) -> Banned:
    ids = sorted({token - token_offset for token in banned})
    if len(ids) > MAX_BANNED:
        raise ValueError(
            f"{len(ids)} banned ids; wanted at most {MAX_BANNED} on a GPU: set their logits to -inf"
        )
    return Banned(len(ids), (c_int * MAX_BANNED)(*ids))


def _requests(
    offsets: Tensor, rule: Tensor, value: Tensor, num_rows: int
) -> tuple[Requests, Scratch, Tensor]:
    """The structs, and the scratch memory, to be kept until the launch."""
    memory = torch.empty((2, num_rows), dtype=torch.float32, device=offsets.device)
    requests = Requests(_pointer(offsets), _pointer(rule), _pointer(value), num_rows)
    begin = _pointer(memory)
    return requests, Scratch(begin, begin + memory.element_size() * num_rows), memory


def _outcome(outcome: StepOutcome) -> Outcome:
    memory, begins = _pointer(outcome.memory), outcome.begins
    fields = ("token", "confidence", "statistics", "num_left", "unmask")
    return Outcome(*(memory + begins[name] for name in fields))


def _check_requests(offsets: Tensor, rule: Tensor, num_rows: int) -> None:
    ends, rules = offsets.tolist(), rule.tolist()
    if ends[0] != 0 or ends[-1] != num_rows:
        raise bad_request(len(rules), offsets, rule)
    for request, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if not begin <= end <= num_rows or rules[request] < THRESHOLD:
            raise bad_request(request, offsets, rule)


def open_device(device: torch.device) -> tuple[CudaKernels, str]:
    """The kernels on a GPU, and a name for the log. Raises KernelsUnavailable."""
    driver = Driver(device)
    properties = torch.cuda.get_device_properties(device)
    kernels = CudaKernels(driver, properties.multi_processor_count, properties.total_memory)
    return kernels, f"cuda ({driver.arch})"
