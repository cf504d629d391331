"""The loops of a formed instance's ranks: the leader's, which runs ahead of the head, and the followers'.

Owns the order of things: commands, plan, step, report. Knows nothing of how an instance is formed, nor of
what a step does. All ranks apply the same commands and run the same steps, so only the leader reports.
"""

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import zmq

from dlmserve.messages import (
    Admit,
    Cancel,
    Command,
    Dissolve,
    Failure,
    Form,
    Introduce,
    Leave,
    Release,
    RequestStep,
    RunStep,
    SetRefresh,
    SetThreshold,
    Shutdown,
    StepReport,
)
from dlmserve.transport import Dealer, PlanReceiver, PlanSender

if TYPE_CHECKING:
    from dlmserve.worker.shards import Shard


class StepResult(Protocol):
    num_tokens: int
    requests: list[RequestStep]
    released: list[int]
    failed: list[Failure]


class StepRecord(Protocol):
    def result(self) -> StepResult: ...


class Engine(Protocol):
    """What the loops need of an engine."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_pages_in_use(self) -> int: ...
    @property
    def details(self) -> str: ...
    @property
    def token_s(self) -> float: ...
    @property
    def num_bytes_read(self) -> int: ...
    def apply(self, command: Command) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepResult: ...
    def launch(self) -> None: ...
    def finish(self) -> StepRecord: ...
    def shards(self) -> "list[Shard]": ...
    def check(self) -> None: ...
    def close(self) -> None: ...


def lead(form: Form, engine: Engine, head: Dealer) -> None:
    """Step after step without waiting for the head; returns when the head dissolves the instance.

    Raises SystemExit on Shutdown, WorkerError where a peer is lost, and whatever the engine raises.
    """
    followers = PlanSender(form.key, form.plan_endpoints[1:])
    timer = StepTimer()
    untold: list[Step] = []  # the last one: the head hears of it while the next one runs
    try:
        while (commands := receive_commands(form, head, wait=not engine.has_work())) is not None:
            followers.send(RunStep(commands), form.collective_timeout_s)
            apply(commands, engine)
            if engine.has_work():
                timer.start()
                engine.launch()
                tell_all(head, form, untold)
                record = engine.finish()
                timer.stop(engine.has_work())
                times = (timer.seq, timer.duration_s, timer.idle_s)
                untold.append(Step(*times, engine.num_pages_in_use, record))
            if not engine.has_work():
                tell_all(head, form, untold)
                engine.check()
        tell_all(head, form, untold)
        followers.send(Leave(), form.collective_timeout_s)
    finally:
        followers.close()


def follow(form: Form, engine: Engine, head: Dealer, plans: PlanReceiver) -> None:
    """Do what the leader says; returns when it leaves, or when the head dissolves what has lost its leader.

    Raises like `lead`.
    """
    plans.formation = form.key
    poller = zmq.Poller()
    poller.register(plans.socket, zmq.POLLIN)
    poller.register(head.socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if head.socket in ready and receive_commands(form, head, wait=False) is None:
            return
        match plans.receive(timeout_s=0):
            case Leave():
                return
            case RunStep(commands):
                apply(commands, engine)
                if engine.has_work():
                    engine.launch()
                    engine.finish()
                else:
                    engine.check()


def receive_commands(form: Form, head: Dealer, wait: bool) -> list[Command] | None:
    """All that the head has sent, in order; None: the instance is dissolved, or of a head that is gone.

    Blocks only where `wait` is set, until there is a message. Raises SystemExit on Shutdown.
    """
    messages = head.drain()
    if wait and not messages:
        messages = [head.receive(), *head.drain()]
    commands: list[Command] = []
    for message in messages:
        match message:
            case Admit() | SetThreshold() | SetRefresh() | Release() | Cancel():
                commands.append(message)
            case Dissolve(instance) if instance == form.instance:
                return None
            case Introduce():
                return None
            case Shutdown():
                raise SystemExit
    return commands


def apply(commands: list[Command], engine: Engine) -> None:
    for command in commands:
        engine.apply(command)


class Step(NamedTuple):
    """What there is to tell of a step that is done, as of its end."""

    seq: int
    duration_s: float
    idle_s: float
    num_pages_in_use: int
    record: StepRecord

    def report(self, instance: str) -> StepReport:
        result = self.record.result()
        return StepReport(
            instance=instance,
            seq=self.seq,
            duration_s=self.duration_s,
            idle_s=self.idle_s,
            num_tokens=result.num_tokens,
            num_pages_in_use=self.num_pages_in_use,
            requests=result.requests,
            released=result.released,
            failed=result.failed,
        )


def tell_all(head: Dealer, form: Form, steps: list[Step]) -> None:
    while steps:
        head.send(steps.pop(0).report(form.instance))


class StepTimer:
    """Numbers the steps; times each of them, and how long the instance idled before it while it had work."""

    def __init__(self) -> None:
        self.seq = 0
        self.duration_s = self.idle_s = 0.0
        self._idle_since: float | None = None  # None: without work

    def start(self) -> None:
        self.seq += 1
        self._started_at = time.perf_counter()
        self.idle_s = 0.0 if self._idle_since is None else self._started_at - self._idle_since

    def stop(self, has_work: bool) -> None:
        now = time.perf_counter()
        self.duration_s = now - self._started_at
        self._idle_since = now if has_work else None
