"""Measured step times on disk: a JSON file for each (model, device, dtype, threads, TP degree).

Owns the file's form and its place in the user's cache folder. Knows nothing of how steps are measured, nor
of what is made of their times.

A file holds {"key": {...}, "source": text, "grid": "quick" | "full", "step_s": {tp_degree: [[tokens, requests,
seconds], ...]}}; files of several TP degrees may be merged into one (`merge`).
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlmserve import __version__
from dlmserve.errors import ConfigError

Points = list[tuple[int, int, float]]  # (packed tokens, requests, seconds)


@dataclass(frozen=True)
class ProfileKey:
    """What step times depend on. `device` is the name of the processor or card."""

    model: str  # its folder
    load_format: str
    device: str
    dtype: str
    threads: int
    tp_degree: int
    version: str = __version__  # of dlmserve: another one may have other kernels

    @property
    def path(self) -> Path:
        name = re.sub(r"\W+", "-", Path(self.model).name).strip("-") or "model"
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        return cache_folder() / f"{name}-tp{self.tp_degree}-{digest}.json"

    @property
    def source(self) -> str:
        return f"{Path(self.model).name}, {self.dtype} on {self.device}, {self.threads} threads"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlmserve" / "profiles"


def load(key: ProfileKey) -> Points | None:
    """None where there is none, or none that can be read."""
    try:
        content = json.loads(key.path.read_text(encoding="utf-8"))
        return [(int(n), int(r), float(s)) for n, r, s in content["step_s"][str(key.tp_degree)]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(key: ProfileKey, points: Points, grid: str) -> Path:
    """Replaces the file as a whole: whoever reads meanwhile sees the old or the new one. Raises OSError."""
    content = {
        "key": asdict(key),
        "source": key.source,
        "grid": grid,
        "step_s": {str(key.tp_degree): [list(point) for point in points]},
    }
    key.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=key.path.parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    os.replace(file.name, key.path)
    return key.path


def read_profile(path: str) -> dict[str, Any]:
    """A profile file's content. Raises ConfigError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {path} cannot be read: {error}; `dlmserve profile` makes one") from error
    if not isinstance(content, dict):
        raise ConfigError(f"profile {path} holds no JSON object; `dlmserve profile` makes one")
    return content


def merge(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One profile of all TP degrees in `contents`; later ones win."""
    step_s: dict[str, Any] = {}
    for content in contents:
        step_s |= content.get("step_s", {})
    return {
        "source": "; ".join(dict.fromkeys(str(each.get("source")) for each in contents)),
        "step_s": step_s,
    }
