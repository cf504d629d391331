"""What /proc knows of running processes: who is below whom, and what each runs. Starts and ends none."""

from collections.abc import Iterable
from pathlib import Path


def with_descendants(roots: Iterable[int]) -> set[int]:
    """These processes and all below them, by parent."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended just now
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    unvisited = list(roots)
    found = set(unvisited)
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found.update(below)
        unvisited += below
    return found


def command_line(pid: int) -> str:
    """Empty for one that is gone, or ended and not yet reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
