"""The simulator: a heap of events around the same Scheduler object that serves.

Owns virtual time: arrivals, steps of simulated instances (which run ahead of the head as the workers do),
reports and commands on their way. Decides nothing. Deterministic: no clock but the one that is passed in to
time decisions.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from dlmserve.config import ServerConfig
from dlmserve.control.planning.block_form import solve
from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import (
    Action,
    Arrived,
    Deliver,
    DissolveInstance,
    Drop,
    Event,
    Fail,
    Finish,
    FormInstance,
    MakePlan,
    NodeLost,
    NodeUp,
    Planned,
    Predict,
    Predicted,
    RankFormed,
    RankLeft,
    RankUp,
    Reject,
    Send,
    StepDone,
    Tick,
)
from dlmserve.control.policy.plan import Problem
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.predictions import Progress, features
from dlmserve.control.policy.request import RequestSpec
from dlmserve.control.policy.scheduler import TICK_S, Scheduler
from dlmserve.messages import Command, Decoding, StepReport
from dlmserve.simulation.instance import EOS, MASK, TEXT, SimulatedEngine
from dlmserve.simulation.recorded import RecordedUnmasking, Recording
from dlmserve.simulation.results import Ledger
from dlmserve.simulation.scenarios import NodeFailure, Scenario
from dlmserve.simulation.step_traces import Oracle, train_predictor
from dlmserve.simulation.unmasking import Unmasking, load_calibration
from dlmserve.simulation.workloads import Job

PredictorName = Literal["catboost", "average", "oracle"]

EMPTY_STEP_S = 1e-4  # a step that only gives requests back
SOLVE_LIMIT_S = 120.0  # real seconds; the plan comes after `plan_s` of virtual time, however long it took


class Worker:
    """One instance's leader: engine, inbox, and the step that is running."""

    def __init__(self, name: str, tp_degree: int, engine: SimulatedEngine) -> None:
        self.name, self.tp_degree, self.engine = name, tp_degree, engine
        self.inbox: list[Command] = []
        self.busy = False
        self.gone = False  # dissolved, or lost with its node
        self.seq = 0
        self.result: Any = None
        self.duration_s = 0.0


class Simulator:
    """One run: `run()` plays all jobs and returns the ledger."""

    def __init__(
        self,
        config: ServerConfig,
        scenario: Scenario,
        seed: int,
        predictor: PredictorName = "catboost",
        clock: Callable[[], float] = lambda: 0.0,
        jobs: list[Job] | None = None,
        make_costs: Callable[[], CostModel] | None = None,
        recording: Recording | None = None,
    ) -> None:
        """`jobs`: the scenario's own unless given; more may be submitted later. `make_costs`: a measured
        profile instead of the scenario's preset. `recording`: real requests instead of the scenario's; they
        have no oracle.
        """
        self._scenario, self._clock = scenario, clock
        policy = make_policy(config)
        asks = policy.wants_predictions and predictor != "average"
        # Its own cost model is the truth; the scheduler's starts from the same profile, without the overhead.
        make_costs = make_costs or (lambda: CostModel.from_preset(scenario.cost_model))
        self._costs, believed = make_costs(), make_costs()
        self._scheduler = Scheduler(config, policy, MASK, scenario.max_model_len, believed, asks, (EOS,))
        self._decoding = Decoding(refresh_blocks=config.refresh_blocks)
        self._unmasking = Unmasking(load_calibration(scenario.text), seed)
        if jobs is None:
            jobs = scenario.jobs(seed) if recording is None else recording.jobs
        self._jobs = jobs
        self._decoder = self._unmasking if recording is None else RecordedUnmasking(recording)
        self._predict = self._make_predictor(predictor, config.thresholds) if asks else None
        self._to_predict: list[Progress] = []
        self._eos_at: dict[int, int] = {}  # live requests: the canvas column of their first EOS
        self._workers: dict[str, Worker] = {}
        self._nodes = scenario.nodes or (sum(scenario.layout),)
        self._generations = itertools.count(1)
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._to_come: Iterator[tuple[int, Job]] = iter(())
        self._num_left = len(self._jobs)
        self.ledger = Ledger()
        self.now = 0.0

    def run(self) -> Ledger:
        """Plays until every request is over."""
        self.start()
        self._to_come = iter(sorted(enumerate(self._jobs), key=lambda each: each[1].arrived_at))
        self._await_arrival()
        while self._num_left:
            self._happen()
        return self.finish()

    # ---- the same in parts, for whoever hands out the jobs

    def start(self) -> None:
        self._start_cluster()
        self._at(0.0, self._tick, None)

    def submit(self, job: Job) -> None:
        """It arrives at its time, which is not over."""
        self._num_left += 1
        self._jobs.append(job)
        self._at(job.arrived_at, self._arrive, len(self._jobs) - 1)

    def advance(self, until: float) -> None:
        while self._heap[0][0] <= until:
            self._happen()

    @property
    def num_left(self) -> int:
        """Requests that are not over."""
        return self._num_left

    def finish(self) -> Ledger:
        self._scheduler.check()
        self.ledger.num_migrations = self._scheduler.num_migrations
        self.ledger.num_reconfigurations = self._scheduler.num_reconfigurations
        return self.ledger

    def _happen(self) -> None:
        self.now, _, happen, what = heapq.heappop(self._heap)
        happen(what)

    def _at(self, at: float, happen: Callable[[Any], None], what: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._order), happen, what))

    def _start_cluster(self) -> None:
        for node in range(len(self._nodes)):
            self._node_up(node)
        for failure in self._scenario.failures:
            self._at(failure.at, self._node_down, failure)

    def _node_up(self, node: int) -> None:
        """Its rank processes are new each time."""
        generation = next(self._generations)
        self._feed(NodeUp(f"node{node}", self._nodes[node]))
        for device in range(self._nodes[node]):
            self._feed(RankUp(RankId(f"node{node}", device, generation), ""))

    def _node_down(self, failure: NodeFailure) -> None:
        self._feed(NodeLost(f"node{failure.node}", "it is cut off"))
        self._at(self.now + failure.down_s, self._node_up, failure.node)

    def _make_predictor(
        self, name: PredictorName, thresholds: tuple[float, ...]
    ) -> Callable[[list[Progress]], np.ndarray]:
        """Steps left [n, T], in the descending order of thresholds that the scheduler has."""
        descending = tuple(sorted(thresholds, reverse=True))
        if name == "oracle":
            return Oracle(self._unmasking, self._jobs, descending).predict
        trained = train_predictor(self._scenario, descending)
        return lambda progress: trained.predict(features(progress), np.array(descending))

    # ---- what happens

    def _await_arrival(self) -> None:
        """Only the next one is in the heap: a day's requests in it would make every event slower."""
        for number, job in self._to_come:
            self._at(job.arrived_at, self._arrive_in_turn, number)
            return

    def _arrive_in_turn(self, number: int) -> None:
        self._await_arrival()
        self._arrive(number)

    def _arrive(self, number: int) -> None:
        job = self._jobs[number]
        if job.answer < job.output:
            self._eos_at[number] = job.prompt + job.answer
        self._feed(Arrived(number, self._spec(number, job)))

    def _spec(self, number: int, job: Job) -> RequestSpec:
        length = job.prompt + job.output
        canvas = [TEXT] * job.prompt + [MASK] * job.output
        return RequestSpec(
            str(number), canvas, job.prompt, length, length, self._decoding, slo_s=self._scenario.slo_s
        )

    def _tick(self, _: None) -> None:
        self._feed(Tick())
        self._at(self.now + TICK_S, self._tick, None)

    def _report(self, report: StepReport) -> None:
        started_at = self._clock()
        actions = self._scheduler.on_event(self.now, StepDone(report))
        self.ledger.decision_s.append(self._clock() - started_at)
        self._perform(actions)

    def _answer(self, _: None) -> None:
        """The predictor: all that has been asked since the last answer, in one batch."""
        assert self._predict
        progress, self._to_predict = self._to_predict, []
        self._feed(Predicted(tuple(progress), self._predict(progress)))

    def _plan(self, problem: Problem) -> None:
        self._feed(Planned(solve(problem, SOLVE_LIMIT_S)))

    # ---- an instance: as the worker's loop, drain the inbox, run a step, report

    def _command(self, what: tuple[Worker, Command]) -> None:
        worker, command = what
        worker.inbox.append(command)
        if not worker.busy and not worker.gone:
            self._start_step(worker)

    def _start_step(self, worker: Worker) -> None:
        engine = worker.engine
        for command in worker.inbox:
            engine.apply(command)
        worker.inbox.clear()
        worker.busy = engine.has_work()
        if worker.busy:
            worker.seq += 1
            worker.result = engine.step()
            worker.duration_s = self._step_s(worker)
            self._at(self.now + worker.duration_s, self._end_step, worker)

    def _end_step(self, worker: Worker) -> None:
        if worker.gone:
            return
        result = worker.result
        report = StepReport(
            instance=worker.name,
            seq=worker.seq,
            duration_s=worker.duration_s,
            idle_s=0.0,
            num_tokens=result.num_tokens,
            num_pages_in_use=worker.engine.num_pages_in_use,
            requests=result.requests,
            released=result.released,
            failed=result.failed,
        )
        self._at(self.now + self._scenario.head_s / 2, self._report, report)
        self._start_step(worker)

    def _step_s(self, worker: Worker) -> float:
        result = worker.result
        if result.num_tokens == 0:
            return EMPTY_STEP_S
        step_s = self._costs.step_s(worker.tp_degree, result.num_tokens, len(result.requests))
        return step_s + self._scenario.overhead_s

    # ---- the scheduler's side

    def _feed(self, event: Event) -> None:
        self._perform(self._scheduler.on_event(self.now, event))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver):  # most are, and to match takes twice as long
                did = action.update.did
                self.ledger.on_step(action.request, did.threshold, len(did.positions))
                continue
            match action:
                case Send(instance, command):
                    sent_to = self._workers[instance]
                    self._at(self.now + self._scenario.head_s / 2, self._command, (sent_to, command))
                case Predict(progress):
                    if not self._to_predict:
                        self._at(self.now + self._scenario.predict_s, self._answer, None)
                    self._to_predict += progress
                case Finish(request, _, summary):
                    self.ledger.on_finish(
                        request, self._jobs[request].arrived_at, self._scenario.slo_s, summary
                    )
                    self._forget(request)
                case Drop(request) | Fail(request) | Reject(request):
                    self.ledger.on_drop(request, self._jobs[request].arrived_at, self._scenario.slo_s)
                    self._forget(request)
                case MakePlan(problem):
                    self._at(self.now + self._scenario.plan_s, self._plan, problem)
                case FormInstance(instance, ranks, recompute_tokens):
                    self._form(instance, len(ranks), recompute_tokens)
                case DissolveInstance(instance):
                    self._dissolve(instance)

    def _forget(self, request: int) -> None:
        self._eos_at.pop(request, None)
        self._num_left -= 1

    def _form(self, name: str, tp_degree: int, recompute_tokens: int) -> None:
        """The first ones at once: how a server starts is not what is simulated here."""
        scenario = self._scenario
        num_pages = scenario.num_pages * tp_degree
        budgets = scenario.max_step_tokens, recompute_tokens
        engine = SimulatedEngine(self._decoder, num_pages, scenario.page_size, self._eos_at, *budgets)
        self._workers[name] = Worker(name, tp_degree, engine)
        for tp_rank in range(tp_degree):
            ready_at = self.now + scenario.regroup_s if self.now else 0.0
            self._at(ready_at, self._feed, RankFormed(name, tp_rank, num_pages))

    def _dissolve(self, name: str) -> None:
        """Ranks of a node that is gone say nothing any more; the scheduler ignores what it hears of them."""
        worker = self._workers.pop(name)
        worker.gone = True
        for tp_rank in range(worker.tp_degree):
            self._at(self.now + self._scenario.head_s, self._feed, RankLeft(name, tp_rank, ""))
