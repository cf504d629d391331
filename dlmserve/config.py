"""The settings of a server: one frozen tree, made from flags and an optional TOML file by flags.py.

Knows the meaning and the bounds of each setting; knows nothing of argparse, sockets or torch.
"""

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from dlmserve.errors import ConfigError
from dlmserve.messages import CacheMode

PredictorKind = Literal["auto", "history", "catboost", "hidden", "catboost+hidden"]


@dataclass(frozen=True)
class ServerConfig:
    """Durations in seconds unless named otherwise. `check()` raises ConfigError for what cannot be."""

    model: str = "tiny"
    load_format: str = "auto"
    device: str = "auto"
    devices: int | None = None  # None: what --tp-layout needs (CPU), or all GPUs
    dtype: str = "auto"
    tp_layout: tuple[int, ...] = (1,)
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_queue: int = 1024
    thresholds: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5)
    block_length: int | None = None  # None: the checkpoint's, or 32
    cache: CacheMode = "dual"
    refresh: str = "full"  # "full" | "response:K"
    slo_ms: float | None = None
    policy: str = "dlmserve"
    step_predictor: str | None = None  # folder of a trained one; None: the model's, or the cache folder's
    step_predictor_kind: PredictorKind = "auto"  # the best of what the folder has; "history" needs none
    policy_options: dict[str, float] = field(default_factory=dict)  # what each policy's known_options name
    max_resident_tokens: int | None = None  # per instance, of all canvases; None: the policy's own limit
    reconfigure_every_s: float | None = None  # the planner is asked for a layout so often; None: never
    tp_degrees: tuple[int, ...] = (1, 2, 4)  # that its layouts may have
    workload_window_s: float = 300.0  # over which it looks at the load
    page_size: int = 32
    memory_fraction: float = 0.9
    attention: str = "auto"
    listen: str | None = None
    keys: str | None = None
    drain_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    collective_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    log_format: str = "text"
    run_dir: str | None = field(default=None, repr=False)  # ipc sockets; None: a fresh temporary folder

    @property
    def num_devices(self) -> int:
        return self.devices if self.devices is not None else sum(self.tp_layout)

    @property
    def refresh_blocks(self) -> int:
        """Whole-canvas recompute every k-th block (1: at each block)."""
        return parse_refresh(self.refresh)

    def check(self) -> None:
        """Raises ConfigError naming the setting, its value and what is wanted."""
        choices = {
            "load_format": ("auto", "dummy"),
            "device": ("auto", "cpu", "cuda"),
            "dtype": ("auto", "float32", "bfloat16", "float16"),
            "attention": ("auto", "flash", "varlen", "sdpa"),
            "cache": ("none", "prefix", "dual"),
            "step_predictor_kind": get_args(PredictorKind),
            "log_format": ("text", "json"),
        }
        for name, wanted in choices.items():
            if getattr(self, name) not in wanted:
                raise ConfigError(
                    f"{flag(name)} is {getattr(self, name)!r}; wanted one of: {', '.join(wanted)}"
                )
        if not self.tp_layout:
            raise ConfigError("--tp-layout is empty; wanted at least one TP degree, e.g. 1,1,2")
        if self.num_devices < sum(self.tp_layout) and not self.listen:  # other nodes may bring the rest
            layout = ",".join(map(str, self.tp_layout))
            raise ConfigError(
                f"--tp-layout {layout} needs {sum(self.tp_layout)} devices but --devices is {self.devices}"
            )
        least = {"max_num_seqs": 1, "max_queue": 1, "page_size": 1, "num_devices": 0 if self.listen else 1}
        for name, wanted in least.items():
            if getattr(self, name) < wanted:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; wanted at least {wanted}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(f"--memory-fraction is {self.memory_fraction}; wanted above 0 and at most 1")
        for name in ("tp_degrees", "tp_layout"):
            for degree in getattr(self, name):
                if degree not in (1, 2, 4, 8):
                    raise ConfigError(f"{flag(name)} has TP degree {degree}; wanted 1, 2, 4 or 8")
        if self.reconfigure_every_s is not None and not self.reconfigure_every_s > 0:
            raise ConfigError(f"--reconfigure-every is {self.reconfigure_every_s:g}; wanted seconds, or off")
        if not self.workload_window_s > 0:
            raise ConfigError(f"--workload-window-s is {self.workload_window_s:g}; wanted more than 0")
        for threshold in self.thresholds:
            if not 0.0 < threshold <= 1.0:
                raise ConfigError(f"--thresholds has {threshold}; wanted values above 0 and at most 1")
        if self.block_length is not None and self.block_length < 1:
            raise ConfigError(f"--block-length is {self.block_length}; wanted at least 1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; wanted 0 (any free port) to 65535")
        parse_refresh(self.refresh)


def parse_refresh(text: str) -> int:
    """ "full" -> 1, "response:K" -> K."""
    if text == "full":
        return 1
    match = re.fullmatch(r"response:([1-9]\d*)", text)
    if not match:
        raise ConfigError(
            f"--refresh is {text!r}; wanted 'full' or 'response:K' with K at least 1, e.g. response:4"
        )
    return int(match[1])


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
