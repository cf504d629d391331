"""A Head without instances: decodes tokens from a script, in steps that a test or the event loop drives."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from dlmserve.control.policy.request import CancelOutcome, RequestSpec, Sink, StepUpdate, Summary, Unmasked
from dlmserve.errors import DlmServeError
from dlmserve.messages import RequestStep

EOS = 0  # the tiny model's
Script = Callable[[RequestSpec], list[list[Unmasked]]]  # what each step unmasks


def scripted(
    tokens: list[int], per_step: int = 1, shuffle: int | None = None, confidence: float = 0.5
) -> Script:
    """The given tokens, then EOS; within a block in an order drawn from the seed `shuffle`."""

    def script(spec: RequestSpec) -> list[list[Unmasked]]:
        length = spec.decoding.block_length
        steps = []
        for start in range(spec.output_start, spec.output_end, length):
            columns = list(range(start, min(start + length, spec.output_end)))
            if shuffle is not None:
                random.Random(shuffle).shuffle(columns)
            for i in range(0, len(columns), per_step):
                steps.append(
                    [_unmask(spec, column, tokens, confidence) for column in columns[i : i + per_step]]
                )
        return steps

    return script


def _unmask(spec: RequestSpec, column: int, tokens: list[int], confidence: float) -> Unmasked:
    i = column - spec.output_start
    token = tokens[i] if i < len(tokens) else EOS
    top = [(token + j, -0.5 - j) for j in range(spec.decoding.num_top)] if spec.decoding.num_top else None
    return Unmasked(column, token, confidence, top)


def as_step(request: int, block: int, spec: RequestSpec, unmasked: list[Unmasked]) -> RequestStep:
    columns = [each.position for each in unmasked]
    tokens, confidences = [each.token for each in unmasked], [each.confidence for each in unmasked]
    tops = [each.top for each in unmasked if each.top is not None] or None
    return RequestStep(request, False, block, spec.decoding.value, columns, tokens, confidences, top=tops)


@dataclass
class Running:
    spec: RequestSpec
    sink: Sink
    steps: list[list[Unmasked]]
    canvas: dict[int, int] = field(default_factory=dict)  # columns unmasked so far
    num_steps: int = 0
    num_unmasked: int = 0

    def summary(self) -> Summary:
        value = self.spec.decoding.value if self.spec.decoding.rule == "threshold" else None
        slo_met = None if self.spec.slo_s is None else True
        return Summary(self.num_steps, 1, self.num_unmasked, value, 0.25, self.spec.slo_s, slo_met, ["a"])

    def finished(self, eos_ids: tuple[int, ...]) -> str:
        """As the engine decides it: the first EOS without a mask before it, or the whole answer."""
        for column in range(self.spec.output_start, self.spec.limit):
            if column not in self.canvas:
                return ""
            if self.canvas[column] in eos_ids and not self.spec.decoding.ignore_eos:
                return "stop"
        return "length"


class FakeHead:
    """`paused`: steps happen only in `step()`. `refuse`: what submit raises. `fail_at`: steps that fail."""

    def __init__(self, script: Script, paused: bool = False, eos_ids: tuple[int, ...] = (EOS, 4)) -> None:
        self.ready, self.draining = True, False
        self.capacity = 1
        self.layouts: list[list[int]] = []
        self.script, self.paused, self.eos_ids = script, paused, eos_ids
        self.refuse: DlmServeError | None = None
        self.refuse_after = 0  # submissions that are still taken
        self.fail_at: dict[tuple[int, int], DlmServeError] = {}  # by request number and step
        self.specs: list[RequestSpec] = []
        self.cancelled: list[tuple[int, str]] = []
        self.running: dict[int, Running] = {}
        self.stepped = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    def submit(self, spec: RequestSpec, sink: Sink) -> int:
        if self.refuse is not None and len(self.specs) >= self.refuse_after:
            raise self.refuse
        self.specs.append(spec)
        number = len(self.specs)
        self.running[number] = Running(spec, sink, self.script(spec))
        if not self.paused:
            task = asyncio.get_running_loop().create_task(self._decode(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return number

    def cancel(self, request: int, outcome: CancelOutcome) -> Summary | None:
        run = self.running.pop(request, None)
        if run is None:
            return None
        self.cancelled.append((request, outcome))
        return run.summary()

    def cluster(self) -> dict:
        return {"running": len(self.running)}

    def want_layout(self, layout: list[int]) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.layouts.append(layout)

    def step(self, number: int) -> None:
        """One denoising step of one request."""
        run = self.running[number]
        error = self.fail_at.get((number, run.num_steps + 1))
        if error is not None:
            del self.running[number]
            return run.sink.on_error(error)
        unmasked = run.steps[run.num_steps]
        run.num_steps += 1
        run.num_unmasked += len(unmasked)
        run.canvas.update((u.position, u.token) for u in unmasked)
        block = (unmasked[0].position - run.spec.output_start) // run.spec.decoding.block_length
        run.sink.on_step(StepUpdate(run.num_steps, as_step(number, block, run.spec, unmasked)))
        reason = run.finished(self.eos_ids)
        if reason and self.running.pop(number, None):
            run.sink.on_finish("stop" if reason == "stop" else "length", run.summary())

    async def _decode(self, number: int) -> None:
        while number in self.running:
            self.step(number)
            await asyncio.sleep(0)
