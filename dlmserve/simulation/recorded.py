"""Unmasking recorded from a real engine, played back in the simulator's instances.

A recording holds, for each request at each threshold, which positions fell in which step of which block. A
request whose threshold changes goes on in the course of its new one: at the first step there that unmasks
something it still has masked. Knows nothing of models or of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlmserve.simulation.workloads import Job


class RecordedStep(NamedTuple):
    """`positions`: within the block."""

    block: int
    positions: tuple[int, ...]
    confidences: tuple[float, ...]


Course = Sequence[RecordedStep]


@dataclass(frozen=True)
class Recording:
    """`jobs` in the order of their arrival; `courses[i]` of job i, by threshold."""

    jobs: list[Job]
    courses: list[Mapping[float, Course]]


@dataclass
class _Row:
    request: int = 0
    block: int = 0
    threshold: float = 0.0
    masked: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


class RecordedUnmasking:
    """What decides which masks fall in a step (`instance.BlockDecoder`)."""

    def __init__(self, recording: Recording) -> None:
        self._courses = recording.courses
        self._rows: list[_Row] = []
        self._free: list[int] = []

    def enter(self) -> int:
        if not self._free:
            self._rows.append(_Row())
            return len(self._rows) - 1
        return self._free.pop()

    def leave(self, row: int) -> None:
        self._free.append(row)

    def begin_block(
        self, row: int, request: int, block: int, masked: np.ndarray, steps_in_block: int = 0
    ) -> None:
        entry = self._rows[row]
        entry.request, entry.block, entry.masked = request, block, masked.copy()

    def set_threshold(self, row: int, threshold: float) -> None:
        self._rows[row].threshold = threshold

    def masked(self, row: int) -> np.ndarray:
        return self._rows[row].masked

    def step(self, rows: list[int]) -> tuple[list[int], list[int], list[float], np.ndarray]:
        """(index into rows, position in block, confidence) of all that is unmasked; masks left [len(rows)]."""
        index: list[int] = []
        positions: list[int] = []
        confidences: list[float] = []
        for i, row in enumerate(rows):
            for position, confidence in self._next(self._rows[row]):
                self._rows[row].masked[position] = False
                index.append(i)
                positions.append(position)
                confidences.append(confidence)
        left = np.array([self._rows[row].masked.sum() for row in rows])
        return index, positions, confidences, left

    def _next(self, row: _Row) -> list[tuple[int, float]]:
        courses = self._courses[row.request]
        nearest = min(courses, key=lambda threshold: abs(threshold - row.threshold))
        for step in courses[nearest]:
            if step.block == row.block:
                pairs = zip(step.positions, step.confidences, strict=True)
                if fresh := [(position, sure) for position, sure in pairs if row.masked[position]]:
                    return fresh
        # Past the course's end: its answer was complete there, at this threshold it is not.
        return [(int(position), 1.0) for position in np.flatnonzero(row.masked)]
