"""What every benchmark's JSON carries, and how figures are taken: medians of interleaved repeats in one process."""

import json
import os
import platform
import subprocess
from pathlib import Path
from statistics import median


def machine() -> dict:
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "unknown",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "arch": platform.machine(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Short hash of the checkout, with "+" where files differ from it; "unknown" outside a checkout."""
    root = Path(__file__).parent.parent
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(path: str, seed: int, results: dict | list) -> None:
    report = {"seed": seed, "commit": commit(), "machine": machine(), "results": results}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n")


def spread(samples: list[float]) -> dict[str, float]:
    return {"median": median(samples), "min": min(samples), "max": max(samples), "runs": len(samples)}


def _git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *args], check=True, capture_output=True, text=True
    ).stdout.strip()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
