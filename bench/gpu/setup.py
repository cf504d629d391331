"""What the parts of the GPU report share: the model's shape, an engine on the device, clocks.

A step's begin and end are marked on the device, so that its idle time between steps is known beside the host's.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlmserve.messages import Admit, Decoding, Form, ModelSpec
from dlmserve.worker.build import build_on
from dlmserve.worker.device import Device, Wait, make_device
from dlmserve.worker.engine import Engine
from dlmserve.worker.parallel import SOLO

# GSAI-ML/LLaDA-8B's config.json, as far as it matters here.
LLADA_8B = {
    "architectures": ["LLaDAModelLM"],
    "d_model": 4096,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 126081,
    "mask_token_id": 126336,
}
SMALL = LLADA_8B | {
    "d_model": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 128,
    "vocab_size": 512,
    "embedding_size": 512,
    "eos_token_id": 510,
    "mask_token_id": 511,
}


@dataclass(frozen=True)
class Setting:
    """Where and how large. `small`: sizes that exercise every line in seconds."""

    device: str  # "cpu" | "cuda:0"
    small: bool
    folder: str  # of config.json alone: weights are random

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def config(self) -> dict:
        return SMALL if self.small else LLADA_8B

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.on_gpu else torch.float32

    def size(self, full: int, small: int) -> int:
        return small if self.small else full

    def write_config(self) -> None:
        Path(self.folder, "config.json").write_text(json.dumps(self.config))


@dataclass
class StepClock:
    """Instants of the steps of one engine, on the device's own time line. See `watch`."""

    on_gpu: bool
    marks: list = field(default_factory=list)  # begin, end, begin, end, ...

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def busy_s(self) -> list[float]:
        return [self._between(i, i + 1) for i in range(0, len(self.marks), 2)]

    def idle_s(self) -> list[float]:
        return [self._between(i, i + 1) for i in range(1, len(self.marks) - 1, 2)]

    def _between(self, i: int, j: int) -> float:
        if self.on_gpu:
            return self.marks[i].elapsed_time(self.marks[j]) / 1e3
        return self.marks[j] - self.marks[i]


def watch(device: Device, clock: StepClock) -> None:
    """Marks begin and end of whatever `device` is asked to start from here on: from the copy to it, not from what the
    host does before, while the device idles.
    """
    start, upload = device.start, device.upload
    began = True

    def marked_upload(host: Tensor, device: Tensor) -> None:
        nonlocal began
        if not began:
            clock.mark()
            began = True
        upload(host, device)

    def marked_start(work: Callable[[], list[Tensor]]) -> Wait:
        def timed_work() -> list[Tensor]:
            nonlocal began
            began = False
            out = work()
            clock.mark()
            return out

        return start(timed_work)

    device.start, device.upload = marked_start, marked_upload


def make_engine(
    setting: Setting,
    max_num_seqs: int,
    max_model_len: int,
    graphs: bool = True,
    attention: str = "auto",
    device: Device | None = None,
) -> tuple[Engine, StepClock]:
    """LLaDA's shape with random weights, on `device` or the setting's. On a CPU varlen stands in for a GPU's kernel."""
    if attention == "auto" and not setting.on_gpu:
        attention = "varlen"
    dtype = str(setting.dtype).removeprefix("torch.")
    model = ModelSpec(setting.folder, "dummy", dtype, setting.config["mask_token_id"], [])
    num_pages = max_num_seqs * -(-max_model_len // 32)
    limits = (max_model_len, max_num_seqs, num_pages, 32, 60.0)
    form = Form("report", 0, 1, [], "", model, *limits, attention=attention)
    device, clock = device or make_device(setting.device), StepClock(setting.on_gpu)
    engine = build_on(device, form, SOLO, with_graphs=graphs)
    watch(device, clock)
    return engine, clock


def admit(
    setting: Setting,
    request: int,
    prompt_len: int,
    output_len: int,
    block: int,
    value: float,
    cache: str,
    rule: str = "steps",
) -> Admit:
    """A request with a random prompt and, unless told otherwise, a fixed schedule of `value` steps for each block."""
    prompt = np.random.default_rng(request).integers(0, setting.config["vocab_size"] - 8, prompt_len).tolist()
    end = prompt_len + output_len
    decoding = Decoding(block_length=block, cache=cache, rule=rule, value=float(value), ignore_eos=True)  # type: ignore[arg-type]
    canvas = prompt + [setting.config["mask_token_id"]] * output_len
    return Admit(request, canvas, prompt_len, end, end, decoding)


def seconds(setting: Setting, work: Callable[[], object], repeats: int) -> list[float]:
    """Of each of `repeats` runs after two that warm up, on the device's own time line."""
    clock = StepClock(setting.on_gpu)
    for i in range(repeats + 2):
        if i == 2:
            clock.marks.clear()
        clock.mark()
        work()
        clock.mark()
    if setting.on_gpu:
        torch.cuda.synchronize()
    return clock.busy_s()
