"""Unmasking recorded from a real engine, played back in the simulator's instances.

A recording holds, for each request at each threshold, which positions fell in which step of which block. A
request whose threshold changes goes on in the course of its new one: at the first step there that unmasks
something it still has masked. Knows nothing of models or of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class RecordedBlock:
    """A block that is played back (`instance.DecodingBlock`)."""

    def __init__(self, courses: Mapping[float, Course], block: int, masked: int, threshold: float) -> None:
        self._courses, self._block = courses, block
        self.masked, self._threshold = masked, threshold

    def set_threshold(self, threshold: float) -> None:
        self._threshold = threshold

    def step(self) -> tuple[list[int], list[float]]:
        pairs = self._next()
        for position, _ in pairs:
            self.masked ^= 1 << position
        return [position for position, _ in pairs], [confidence for _, confidence in pairs]

    def _next(self) -> list[tuple[int, float]]:
        nearest = min(self._courses, key=lambda threshold: abs(threshold - self._threshold))
        for step in self._courses[nearest]:
            if step.block == self._block:
                pairs = zip(step.positions, step.confidences, strict=True)
                if fresh := [(position, sure) for position, sure in pairs if self.masked >> position & 1]:
                    return fresh
        # Past the course's end: its answer was complete there, at this threshold it is not.
        return [
            (position, 1.0) for position in range(self.masked.bit_length()) if self.masked >> position & 1
        ]


class RecordedUnmasking:
    """What decides which masks fall in a step (`instance.BlockDecoder`)."""

    def __init__(self, recording: Recording) -> None:
        self._courses = recording.courses

    def begin_block(
        self, request: int, block: int, masked: int, threshold: float, steps_in_block: int = 0
    ) -> RecordedBlock:
        return RecordedBlock(self._courses[request], block, masked, threshold)
