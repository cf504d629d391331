"""The next step is planned while one runs, and a step is described after the next one was launched: nobody can tell."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace
from torch import Tensor

from dlmserve.messages import (
    Admit,
    Cancel,
    Command,
    Decoding,
    Form,
    ModelSpec,
    Release,
    SetRefresh,
    SetThreshold,
)
from dlmserve.worker.build import build_on
from dlmserve.worker.device import Device
from dlmserve.worker.engine import Engine, StepResult
from dlmserve.worker.parallel import SOLO
from dlmserve.worker.record import StepRecord
from tests.fake_gpu import FakeGpu

MASK = 318
ENDS = list(
    range(0, 318, 12)
)  # so many that answers end in the middle of a block, and with masks before the end
MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(golden_folder: Callable[[str], str]) -> MakeEngine:
    def make(device: Device | None = None, family: str = "llada", recompute_tokens: int = 0) -> Engine:
        spec = ModelSpec(golden_folder(f"{family}/model_A"), "auto", "float32", MASK, ENDS)
        form = Form("i", 0, 1, [], "", spec, 64, 4, 14, 8, 10.0, attention="varlen")
        form = replace(form, recompute_tokens=recompute_tokens)
        return build_on(device or Device(), form, SOLO, with_graphs=isinstance(device, FakeGpu))

    return make


def admit(
    request: int, prompt: int = 5, masks: int = 24, limit: int | None = None, **decoding: object
) -> Admit:
    options = {"block_length": 8, "ignore_eos": True, **decoding}
    end = prompt + masks
    canvas = [7 + request % 90] * prompt + [MASK] * masks
    return Admit(request, canvas, prompt, end, prompt + (limit or masks), Decoding(**options))  # type: ignore[arg-type]


def random_commands(
    random: np.random.Generator, number: int, num_steps: int, block_causal: bool
) -> Iterator[list[Command]]:
    """What comes before each step; requests are numbered from `number` on."""
    rules = [{}, {"rule": "steps", "value": 3.0}, {"rule": "factor", "value": 2.0}, {"value": 0.3}]
    rules.append({"max_block_steps": 3})
    ways = [{}, {}, {}, {"temperature": 0.8, "seed": 3}, {"num_top": 2}, {"temperature": 1.0, "top_k": 9}]
    first = number
    for _ in range(num_steps):
        commands: list[Command] = []
        for _ in range(random.integers(0, 3)):
            request = int(random.integers(max(first, number - 5), number + 1))
            kind = random.integers(0, 10)
            if kind < 4 or number == first:
                more: dict[str, object] = {"cache": str(random.choice(["dual", "dual", "prefix", "none"]))}
                more["block_causal"] = block_causal
                more |= rules[random.integers(len(rules))] | ways[random.integers(len(ways))]
                masks = int(random.integers(1, 33))
                limit = int(random.integers(1, masks + 1))
                ignore_eos = bool(random.integers(0, 2))
                command = admit(
                    number, int(random.integers(1, 30)), masks, limit, **more, ignore_eos=ignore_eos
                )
                commands.append(command)
                number += 1
            elif kind < 7:
                commands.append(SetThreshold(request, float(random.uniform(0.1, 1.0))))
            else:
                late = [Cancel(request), Release(request), SetRefresh(request, int(random.integers(1, 4)))]
                commands.append(late[kind - 7])
        yield commands


Told = list[tuple[StepResult, int]]  # and the pages in use at the end of the step


def step_by_step(engine: Engine, story: list[list[Command]]) -> Told:
    """Each step planned from the canvases alone, and described before the next."""
    told = []
    for commands in story:
        for command in commands:
            engine.apply(command)
        if engine.has_work():
            engine._next = None
            engine.launch()
            engine._next = None  # so that every request is looked at
            told.append((engine.finish().result(), engine.num_pages_in_use))
            engine.check()
    return told


def ahead(engine: Engine, story: list[list[Command]]) -> Told:
    told, untold = Told(), list[tuple[StepRecord, int]]()

    def tell() -> None:
        told.extend((record.result(), pages) for record, pages in untold)
        untold.clear()

    for commands in story:
        for command in commands:
            engine.apply(command)
        if engine.has_work():
            engine.launch()
            tell()
            untold.append((engine.finish(), engine.num_pages_in_use))
            engine.check()
    tell()
    return told


@pytest.mark.parametrize(("kind", "family"), [(Device, "dream"), (FakeGpu, "llada"), (FakeGpu, "sdar")])
def test_planned_ahead_and_described_late_is_what_step_by_step_gives(
    kind: type[Device], family: str, make_engine: MakeEngine
) -> None:
    ends = set()
    one, other = (make_engine(kind(), family, recompute_tokens=50) for _ in range(2))
    for seed in range(4):
        random = np.random.default_rng(seed)
        story = [*random_commands(random, 1000 * seed, 50, family == "sdar"), *[[]] * 50]
        told = ahead(one, story)
        assert told == step_by_step(other, story)
        assert not one.has_work()
        ends |= {step.finished for result, _ in told for step in result.requests}
        ends |= {failure.kind for result, _ in told for failure in result.failed}
        ends |= {"released" for result, _ in told if result.released}
    assert ends == {"", "stop", "length", "no_pages", "released"}, "all of it happens"


def test_a_step_is_described_as_it_was_though_the_next_one_runs(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.apply(admit(0, value=0.2))
    for _ in range(8):
        engine.launch()
        record = engine.finish()
        block = engine._residents[0].block
        if block:
            break
    engine.apply(SetThreshold(0, 0.9))
    engine.apply(Cancel(0))
    engine.apply(admit(1, prompt=9))  # its canvas takes the place of the other's
    engine.launch()
    (step,) = record.result().requests
    assert block == 1 and step.block == 0 and step.request == 0 and step.threshold == pytest.approx(0.2)
    assert set(step.positions) <= set(range(5, 13)) and MASK not in step.tokens
    assert [step.request for step in engine.finish().result().requests] == [1]


@pytest.fixture
def placed(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[int]]:
    """An engine, and how many spans were placed each time that a step was planned."""
    engine, log = make_engine(FakeGpu()), list[int]()
    place = engine._runner.place
    monkeypatch.setattr(engine._runner, "place", lambda spans: log.append(len(spans)) or place(spans))
    return engine, log


def test_a_plan_holds_while_each_request_stays_in_its_block(placed: tuple[Engine, list[int]]) -> None:
    engine, log = placed
    engine.apply(admit(0, rule="steps", value=8.0))
    engine.apply(admit(1, rule="steps", value=8.0))
    engine.step()
    assert log == [2, 2], "the recompute step's, and that of the cache steps after it"
    for _ in range(6):
        engine.step()
    assert log == [2, 2]
    engine.apply(SetThreshold(0, 0.5))
    (step, _) = engine.step().requests
    assert log == [2, 2] and step.threshold == 0.5, "a new threshold leaves the plan as it is"
    engine.step()
    assert log == [2, 2, 2, 2], "the next block's"


@pytest.mark.parametrize(
    ("command", "spans"), [(Cancel(0), [1]), (admit(2), [3, 3]), (Cancel(5), []), (Release(0), [])]
)
def test_a_plan_is_dropped_when_somebody_comes_or_goes(
    command: Command, spans: list[int], placed: tuple[Engine, list[int]]
) -> None:
    engine, log = placed
    for request in (0, 1):
        engine.apply(admit(request, rule="steps", value=8.0))
    engine.step()
    engine.step()
    log.clear()
    engine.apply(command)
    engine.step()
    assert log == spans


def test_a_plan_is_dropped_when_a_request_is_done(placed: tuple[Engine, list[int]]) -> None:
    engine, log = placed
    engine.apply(admit(0, masks=8, limit=2, rule="steps", value=8.0))
    engine.apply(admit(1, masks=8, rule="steps", value=8.0))
    sizes = [len(engine.step().requests) for _ in range(8)]
    assert sizes[0] == 2 and sizes[-1] == 1, "the first ends in its block, at its limit"
    assert log == [2, 2, 1]


def test_what_a_graph_has_is_not_copied_to_the_device_again(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, sizes = FakeGpu(), list[int]()
    engine = make_engine(device)
    upload = device.upload

    def noted(host: Tensor, device: Tensor) -> None:
        sizes.append(len(host))
        upload(host, device)

    monkeypatch.setattr(device, "upload", noted)
    for request in range(4):
        engine.apply(admit(request, rule="steps", value=8.0))
    for _ in range(4):
        engine.step()
    first, second, third = sizes[-3:]
    assert first > second == third
