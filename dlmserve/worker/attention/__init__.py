"""Attention of packed spans over each request's own keys: bidirectional or block-causal. Several back ends.

Owns the interface and the choice, made once when an instance is formed. Knows nothing of requests or models.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dlmserve.errors import ConfigError
from dlmserve.worker.attention.sdpa import SdpaAttention
from dlmserve.worker.attention.varlen import VarlenAttention, flash_kernel, plain_kernel, torch_kernel
from dlmserve.worker.batch import Segment
from dlmserve.worker.kv_cache import KVCache, Slots

NAMES = ("auto", "flash", "varlen", "sdpa")


class Plan(Protocol):
    """A back end's view of one batch; `arrays` are what it needs of it on the device."""

    @property
    def arrays(self) -> dict[str, np.ndarray]: ...


class Attention(Protocol):
    @property
    def details(self) -> str:
        """For the log: which one, and what it must copy."""
        ...

    @property
    def fits_graphs(self) -> bool:
        """Lengths and places of keys come from the device: a captured call serves other spans, too."""
        ...

    def plan(self, segments: list[Segment]) -> Plan: ...

    def plan_rectangle(self, places: list[tuple[Slots, int]], span_len: int, num_pages: int) -> Plan | None:
        """For spans of `span_len` packed tokens each, keys of at most `num_pages` pages each, all in the cache:
        those in the first so many of the slots.

        Every array has a shape that follows from len(places), span_len and num_pages alone. None where the back end
        cannot reach these keys without copying them.
        """
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Any,
        index: dict[str, Tensor],
        cache: KVCache | None,
        layer: int,
        only_rows: bool,
    ) -> Tensor:
        """q [T, H, D] of all packed tokens or, with `only_rows`, [M, H, D] of the wanted rows; k, v [T, KVH, D].

        `index` holds the plan's arrays on the device. Returns [T, H * D] or [M, H * D].
        """
        ...


def choose(
    name: str, device: str, dtype: torch.dtype, head_dim: int, page_size: int, block_causal: bool = False
) -> Attention:
    """The back end `name`; "auto": sdpa on CPUs; on GPUs flash or varlen, the first that reads the cache in place at
    this page size, else the first that works, else sdpa. For block-causal models those that can read only copies of
    the keys count as not working: each block of a prompt would need a copy of its own.

    Raises ConfigError where the named one does not work here.
    """
    if name not in NAMES:
        raise ConfigError(f"--attention is {name!r}; wanted one of: {', '.join(NAMES)}")
    if name == "sdpa" or (name == "auto" and device == "cpu"):
        return SdpaAttention()
    if device == "cpu":
        if name == "flash":
            raise ConfigError("--attention is 'flash', which needs a GPU; use varlen or sdpa on a CPU")
        return VarlenAttention(plain_kernel(), page_size)
    reasons: list[str] = []
    found: list[VarlenAttention] = []
    if (unfit := _unfit_for_flash(device, dtype, head_dim)) is not None:
        reasons.append(unfit)
    else:
        for kind, make in (("flash", flash_kernel), ("varlen", torch_kernel)):
            if name in (kind, "auto"):
                try:
                    made = VarlenAttention(make(page_size), page_size)
                except ImportError as error:
                    reasons.append(f"{kind}: {error}")
                    continue
                if block_causal and not made.fits_graphs:
                    reasons.append(f"{kind} would copy the keys of each block; it needs another --page-size")
                else:
                    found.append(made)
    if found:
        return next((each for each in found if each.fits_graphs), found[0])
    if name == "auto":
        return SdpaAttention("; ".join(reasons))
    raise ConfigError(
        f"--attention is {name!r}, which does not work here ({'; '.join(reasons)}); use sdpa or auto"
    )


def _unfit_for_flash(device: str, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention's kernels cannot run here; None where they can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"they compute in float16 or bfloat16, not in {dtype}".replace("torch.", "")
    if head_dim > 256 or head_dim % 8:
        return f"heads of {head_dim} are none of the sizes that they know, multiples of 8 up to 256"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"they need compute capability 8.0, {device} has {major}.{minor}"
