"""A simulated instance computes the spans that the real engine does, step by step, whatever it is told."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from dlmserve.messages import (
    Admit,
    Cancel,
    Command,
    Decoding,
    Form,
    ModelSpec,
    Release,
    RequestStep,
    SetRefresh,
    SetThreshold,
)
from dlmserve.simulation import instance as simulated
from dlmserve.simulation.instance import SimulatedEngine
from dlmserve.worker import engine as real
from dlmserve.worker.build import build_engine
from dlmserve.worker.engine import Engine
from dlmserve.worker.parallel import SOLO

MASK, NO_EOS = 318, 301
PAGE = BLOCK = 8
PROMPTS = [[5, 9, 200, 31], [77] * 19, [3, 250, 8, 8, 90, 41, 17, 260, 111]]
Script = dict[int, list[Command]]  # commands before each step


@dataclass
class Replay:
    """Unmasks what the real engine has unmasked: the only thing that a simulated instance can't know."""

    courses: dict[int, list[RequestStep]]

    def begin_block(
        self, request: int, block: int, masked: int, threshold: float, steps_in_block: int = 0
    ) -> "ReplayedBlock":
        return ReplayedBlock(self.courses.get(request, []), START[request] + block * BLOCK, masked)


@dataclass
class ReplayedBlock:
    course: list[RequestStep]  # its request's, from here on
    start: int
    masked: int

    def set_threshold(self, threshold: float) -> None:
        """It was recorded with the changes in it."""

    def step(self) -> tuple[list[int], list[float]]:
        step = self.course.pop(0)
        inside = [position - self.start for position in step.positions]
        for position in inside:
            assert self.masked >> position & 1, "a position is unmasked twice"
            self.masked ^= 1 << position
        return inside, step.confidences


START = {number: len(prompt) for number, prompt in enumerate(PROMPTS)}


@pytest.fixture
def make_engine(golden_folder: Callable[[str], str]) -> Callable[..., Engine]:
    def make(eos: int = NO_EOS, recompute_tokens: int = 0) -> Engine:
        spec = ModelSpec(golden_folder("llada/model_A"), "auto", "float32", MASK, [eos])
        form = Form("i", 0, 1, [], "", spec, 4096, 8, 64, PAGE, 10.0, recompute_tokens=recompute_tokens)
        return build_engine(form, "cpu", SOLO)

    return make


def admit(request: int, masks: int = 24, limit: int | None = None, **decoding: object) -> Admit:
    prompt = PROMPTS[request]
    options = {"block_length": BLOCK, "ignore_eos": True, "value": 0.6, **decoding}
    start, end = len(prompt), len(prompt) + masks
    canvas = [*prompt, *[MASK] * masks]
    return Admit(request, canvas, start, end, limit or end, Decoding(**options))  # type: ignore[arg-type]


def as_simulated(command: Command) -> Command:
    if not isinstance(command, Admit):
        return command
    canvas = [simulated.MASK if token == MASK else simulated.TEXT for token in command.canvas]
    return replace(command, canvas=canvas)


def play(engine: Engine | SimulatedEngine, script: Script) -> list:
    """Step results until all the script is over and nothing is left."""
    results = []
    while engine.has_work() or len(results) <= max(script):
        for command in script.get(len(results), []):
            engine.apply(command)
        results.append(engine.step())
        engine.check()
        assert len(results) < 500
    return results


def outline(results: list) -> list[tuple]:
    """All that the head can see of a step, but for tokens and confidences."""
    return [
        (
            result.num_tokens,
            [
                (s.request, s.recompute, s.block, s.threshold, s.positions, s.finished)
                for s in sorted(result.requests, key=lambda step: step.request)
            ],
            result.released,
            [failure.request for failure in result.failed],
        )
        for result in results
    ]


def courses(results: list) -> dict[int, list[RequestStep]]:
    """Each request's steps, in order."""
    found: dict[int, list[RequestStep]] = {}
    for result in results:
        for step in result.requests:
            found.setdefault(step.request, []).append(step)
    return found


def unmasked(results: list) -> dict[int, list[tuple]]:
    """What each request unmasked in each of its steps."""
    return {number: [(s.positions, s.tokens) for s in steps] for number, steps in courses(results).items()}


def assert_same(
    real_results: list,
    script: Script,
    num_pages: int = 64,
    eos_at: dict[int, int] | None = None,
    max_step_tokens: int = simulated.MAX_STEP_TOKENS,
    recompute_tokens: int = 0,
) -> None:
    engine = SimulatedEngine(
        Replay(courses(real_results)), num_pages, PAGE, eos_at or {}, max_step_tokens, recompute_tokens
    )
    same = {at: list(map(as_simulated, commands)) for at, commands in script.items()}
    assert outline(play(engine, same)) == outline(real_results)


SCRIPTS: dict[str, Script] = {
    "a batch of three": {0: [admit(0), admit(1), admit(2)]},
    "joining and leaving": {0: [admit(0)], 3: [admit(1, masks=8)], 5: [Cancel(0)], 6: [admit(2)]},
    "thresholds change": {0: [admit(0), admit(1)], 2: [SetThreshold(0, 0.05)], 4: [SetThreshold(1, 0.99)]},
    "released at a block start": {0: [admit(0), admit(1)], 2: [Release(0)]},
    "released before its first step": {0: [admit(0), Release(0)]},
    "response refresh": {0: [admit(0, refresh_blocks=2), admit(1, masks=40, refresh_blocks=3)]},
    "refresh changes": {0: [admit(0, masks=40), admit(1)], 1: [SetRefresh(0, 4)], 9: [SetRefresh(0, 1)]},
    "a limit inside a block": {0: [admit(0, limit=START[0] + 13), admit(1, limit=START[1] + 1)]},
    "a last block that is short": {0: [admit(0, masks=21)]},
    "commands for strangers": {0: [SetThreshold(7, 0.5), Release(7), Cancel(7), SetRefresh(7, 2), admit(2)]},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_have_the_real_engines_spans(name: str, make_engine: Callable[..., Engine]) -> None:
    script = SCRIPTS[name]
    assert_same(play(make_engine(), script), script)


def test_an_answer_that_ends_early_ends_in_the_same_step(make_engine: Callable[..., Engine]) -> None:
    full = play(make_engine(), {0: [admit(0)]})
    tokens = {
        p: t for result in full for s in result.requests for p, t in zip(s.positions, s.tokens, strict=True)
    }
    eos = tokens[START[0] + 10]
    script: Script = {0: [admit(0, ignore_eos=False)]}
    results = play(make_engine(eos), script)
    assert results[-1].requests[0].finished == "stop"
    assert_same(results, script, eos_at={0: min(p for p, token in tokens.items() if token == eos)})


def test_a_moved_request_goes_on_where_it_was(make_engine: Callable[..., Engine]) -> None:
    before = play(make_engine(), {0: [admit(0)], 1: [Release(0)]})
    assert before[-1].released == [0]
    steps = [s for result in before for s in result.requests]
    canvas = [*PROMPTS[0], *[MASK] * 24]
    for step in steps:
        for position, token in zip(step.positions, step.tokens, strict=True):
            canvas[position] = token
    script: Script = {0: [replace(admit(0), canvas=canvas, steps_done=len(steps))]}
    results = play(make_engine(), script)
    assert results[0].requests[0].block == 1
    assert_same(results, script)


def test_who_does_not_fit_in_a_step_takes_part_in_the_next(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert simulated.MAX_STEP_TOKENS == real.MAX_STEP_TOKENS
    monkeypatch.setattr(real, "MAX_STEP_TOKENS", 50)
    script: Script = {0: [admit(0), admit(1), admit(2)]}
    results = play(make_engine(), script)
    assert len(results[0].requests) == 1
    assert_same(results, script, max_step_tokens=50)


def test_who_starts_a_block_waits_while_others_do_and_delays_nobody_inside_one(
    make_engine: Callable[..., Engine],
) -> None:
    script: Script = {0: [admit(0), admit(1), admit(2)]}
    at_once, in_turn = play(make_engine(), script), play(make_engine(recompute_tokens=40), script)
    starts = [[step.request for step in result.requests if step.recompute] for result in in_turn]
    assert [len(each) for each in starts[:3]] == [1, 1, 1], "one fits into 40 tokens, two do not"
    assert max(map(len, starts)) == 1
    inside = {step.request for step in in_turn[1].requests if not step.recompute}
    assert inside == set(starts[0]), "the first one goes on while the second recomputes"
    assert unmasked(in_turn) == unmasked(at_once)
    assert_same(in_turn, script, recompute_tokens=40)


def test_an_admission_beyond_the_pages_fails_alone() -> None:
    engine = SimulatedEngine(Replay({}), 4, PAGE, {})
    for request in (0, 1):
        engine.apply(as_simulated(admit(request)))
    assert engine.num_pages_in_use == 4
    engine.apply(Cancel(0))
    assert [failure.request for failure in engine.step().failed] == [1]
    assert not engine.has_work()
