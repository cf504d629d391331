"""The pure state machine of the server: events in, actions out.

Owns every live request, the waiting queue and the cluster's books; asks the policy where a request goes,
and lets `steering.py` perform what the policy decides for those that run. Knows no clock (`now` is an
argument), no sockets and no texts.

A request is in exactly one place: in the waiting queue, or resident on one instance. A report counts only
if it comes from the instance that holds the request, so nothing is ever applied or delivered twice.
"""

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, Instance, LostInstance, pages_needed
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import (
    Action,
    Arrived,
    Cancelled,
    Deliver,
    DissolveInstance,
    Drop,
    Event,
    Fail,
    Finish,
    FormInstance,
    LayoutWanted,
    NodeLost,
    NodeUp,
    Planned,
    Predicted,
    RankFormed,
    RankLeft,
    RankLost,
    RankUp,
    Reject,
    RestartRank,
    Send,
    StepDone,
    Tick,
)
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.reconfigurer import Reconfigurer
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.steering import Steering
from dlmserve.control.policy.transition import Transition
from dlmserve.control.policy.waiting import WaitingQueue
from dlmserve.errors import ContextTooLong, DlmServeError, QueueFull, Unavailable, WorkerError
from dlmserve.messages import Admit, Cancel, Release, RequestStep, StepReport

TICK_S = 0.1  # how often its owner feeds it a Tick
OF_REQUESTS = (StepDone, Arrived, Cancelled, Predicted)  # events that change no node, rank or instance
MAX_LOSSES = 3  # instances that may die under a request before it is taken for the cause


class Scheduler:
    """`on_event` is the only way in; `check` verifies every invariant."""

    def __init__(
        self,
        config: ServerConfig,
        policy: Policy,
        mask_id: int,
        max_model_len: int,
        costs: CostModel | None = None,
        asks_predictor: bool = False,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """`costs`: a preset where nothing better is known. `asks_predictor`: Predict actions get answers."""
        self._config, self._policy = config, policy
        self._mask_id, self._eos_ids, self._max_model_len = mask_id, frozenset(eos_ids), max_model_len
        self.cluster = Cluster(config.tp_layout, config.max_num_seqs, config.heartbeat_timeout_s)
        self.transition = Transition(self.cluster)
        self.requests: dict[int, RequestState] = {}
        self.num_migrations = 0
        self.num_reconfigurations = 0
        self._waiting = WaitingQueue()
        costs = costs or CostModel.from_preset("h100-measured")
        self.steering = Steering(
            config, policy, costs, self.cluster, self.requests, self._waiting, asks_predictor
        )
        self.reconfigurer = Reconfigurer(config, self.cluster, self.steering)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def on_event(self, now: float, event: Event) -> list[Action]:
        """What is to be done now, in order. Unknown and outdated names are ignored."""
        match event:
            case StepDone():
                actions = self._step_done(now, event.report)
            case Arrived():
                actions = self._arrived(now, event)
            case Cancelled():
                actions = self._cancelled(now, event)
            case RankFormed():
                actions = self._rank_formed(now, event)
            case RankLeft(instance, tp_rank, error):
                actions = self._lost(now, self.cluster.rank_left(instance, tp_rank, now, error))
            case RankUp(rank, plan_endpoint, pid):
                actions = self._lost(now, self.cluster.add_rank(rank, plan_endpoint, pid, now))
            case RankLost():
                actions = self._rank_lost(now, event)
            case NodeUp(node, num_devices):
                actions = self._node_up(now, node, num_devices)
            case NodeLost(node, reason):
                actions = self._node_lost(now, node, reason)
            case LayoutWanted(layout):
                actions = self._layout_wanted(now, layout)
            case Planned(plan):
                actions = self._layout_wanted(now, self.reconfigurer.answer(plan))
            case Predicted():
                self.steering.predicted(event)
                actions = []
            case Tick():
                actions = self._tick(now)
        done = list(actions)
        if not isinstance(event, OF_REQUESTS):
            done += self._reform(now)
        if self.transition.active:
            done += self._change_layout(now)
        # Load control takes too long to be on the way of a step's tokens.
        done += self.steering.decide(now, may_control=not isinstance(event, StepDone))
        return done

    # ---- requests come and go

    def _arrived(self, now: float, event: Arrived) -> Iterator[Action]:
        decoding, length = event.spec.decoding, len(event.spec.canvas)
        pages = pages_needed(length, self._config.page_size, decoding)
        request = RequestState(event.request, event.spec, now, self._mask_id, pages, self._eos_ids)
        error = self._refusal(request)
        if error:
            yield Reject(request.number, error)
            return
        self.requests[request.number] = request
        self._waiting.add(request)
        self.reconfigurer.arrived(now, request)
        self.steering.arrived(request)
        yield from self._place_waiting(now)

    def _refusal(self, request: RequestState) -> DlmServeError | None:
        length, failure = len(request.canvas), self.cluster.failure()
        if length > self._max_model_len:
            return ContextTooLong(
                f"prompt and output need {length} tokens (whole blocks); the model's context has "
                f"{self._max_model_len}: shorten the prompt or ask for fewer tokens"
            )
        if request.num_pages > self.cluster.most_pages():
            return self._no_pages(request)
        if failure:
            return Unavailable(f"no model instance serves: {failure}")
        if len(self._waiting) >= self._config.max_queue:
            return QueueFull(
                f"{len(self._waiting)} requests wait, as many as --max-queue allows; try again later"
            )
        return None

    def _no_pages(self, request: RequestState) -> ContextTooLong:
        most = max(slot.num_pages or 0 for slot in self.cluster.slots) * self._config.page_size
        return ContextTooLong(
            f"prompt and output need {len(request.canvas)} tokens (whole blocks); no instance has KV pages "
            f"for more than {most}: shorten the prompt or ask for fewer tokens"
        )

    def _cancelled(self, now: float, event: Cancelled) -> Iterator[Action]:
        request = self.requests.get(event.request)
        if request is None:
            return
        if request.instance:
            yield Send(request.instance, Cancel(request.number))
        self._forget(request, finished_at=now if event.outcome == "stop" else None)
        yield Drop(request.number, event.outcome, request.summary(now))
        yield from self._place_waiting(now)

    def _step_done(self, now: float, report: StepReport) -> Iterator[Action]:
        instance = self.cluster.instances.get(report.instance)
        if instance is None or report.seq <= instance.last_seq:
            return
        instance.last_seq = report.seq
        num_residents = len(instance.residents)
        stepped: list[tuple[RequestState, RequestStep]] = []
        for step in report.requests:
            if step.request not in instance.residents:
                continue
            request = self.requests[step.request]
            yield Deliver(request.number, request.apply(step), now - request.arrived_at)
            stepped.append((request, step))
            if step.finished:
                self._forget(request, finished_at=now)
                yield Finish(request.number, step.finished, request.summary(now))
        for failure in report.failed:
            if failure.request in instance.residents:
                self._forget(self.requests[failure.request])
                yield Fail(failure.request, failure.error)
        self.steering.stepped(report, instance, stepped)
        for number in report.released:
            if number in instance.residents:
                yield from self._released(now, self.requests[number])
        if len(instance.residents) < num_residents:
            yield from self._place_waiting(now)

    def _released(self, now: float, request: RequestState) -> Iterator[Action]:
        """It goes where it was to move; into the queue if there is no room by now."""
        target = self.cluster.instances.get(request.moving_to or "")
        self._evict(request)
        if target and self.steering.view.has_room(target, request, self._policy.max_resident_tokens):
            self.num_migrations += 1
            yield self._admit(now, request, target)
        else:
            self._waiting.add(request)

    # ---- nodes, ranks and instances come and go

    def _rank_formed(self, now: float, event: RankFormed) -> Iterator[Action]:
        self.steering.formed(event)
        if self.cluster.rank_formed(event.instance, event.tp_rank, event.num_pages, event.token_s):
            yield from self._fail_waiting()
            yield from self._place_waiting(now)

    def _rank_lost(self, now: float, event: RankLost) -> Iterator[Action]:
        yield from self._lost(now, self.cluster.remove_rank(event.rank, now, event.reason))
        yield from self._look_again(now)
        if not event.exited:
            yield RestartRank(event.rank, event.reason)

    def _node_up(self, now: float, node: str, num_devices: int) -> Iterator[Action]:
        self.cluster.add_node(node, num_devices)
        yield from self._look_again(now)

    def _node_lost(self, now: float, node: str, reason: str) -> Iterator[Action]:
        for lost in self.cluster.remove_node(node, now, reason):
            yield from self._lost(now, lost)
        yield from self._look_again(now)

    def _tick(self, now: float) -> Iterator[Action]:
        for rank in self.cluster.stuck_ranks(now):
            yield RestartRank(rank, "it did not leave a lost instance")
        yield from self._place_waiting(now)  # those too that a policy has put off
        if not self.transition.active:
            yield from self.reconfigurer.question(now)

    def _lost(self, now: float, lost: LostInstance | None) -> Iterator[Action]:
        """Its requests go on elsewhere from the head's own canvases, before any that have not started."""
        if lost is None:
            return
        leader = lost.instance.ranks[0]
        told = (leader,) if leader in lost.survivors else lost.survivors
        yield DissolveInstance(lost.instance.name, told, lost.reason)
        for number in list(lost.instance.residents):
            request = self.requests[number]
            request.cache_lost = request.steps_in_block > 0
            request.num_losses += 1
            self._evict(request, lost.instance)
            self._waiting.add(request)
            if request.num_losses >= MAX_LOSSES:
                self._forget(request)
                yield Fail(number, _lost_too_often(request, lost.reason))
        yield from self._place_waiting(now)

    def _reform(self, now: float) -> Iterator[Action]:
        """After a change of the cluster: fills empty slots, gives up on what can no longer run."""
        for instance in self.cluster.form_missing(now):
            yield FormInstance(instance.name, instance.ranks, self._policy.recompute_tokens)
        if self._waiting:
            yield from self._fail_waiting()

    def _layout_wanted(self, now: float, layout: tuple[int, ...] | None) -> Iterator[Action]:
        if (
            layout
            and self.transition.refusal(layout) is None
            and sorted(layout) != sorted(self.cluster.layout)
        ):
            self.num_reconfigurations += 1
            self.transition.want(layout)
            yield from self._place_waiting(now)  # an instance that was draining may be wanted again

    def _look_again(self, now: float) -> Iterator[Action]:
        """The devices are not what they were when the way to the wanted layout was chosen."""
        if self.transition.active:
            self.transition.want(self.cluster.layout)
            yield from self._place_waiting(now)

    def _change_layout(self, now: float) -> Iterator[Action]:
        """The next step towards the wanted layout: requests are asked back, drained instances dissolved."""
        for instance in self.transition.to_drain():
            instance.draining = True
            for number in instance.residents:
                yield Send(instance.name, Release(number))
        drained = [i for i in self.cluster.instances.values() if i.draining and not i.residents]
        for instance in drained:
            self.cluster.dissolve(instance.name, now)
            yield DissolveInstance(instance.name, instance.ranks[:1], "the layout changes", lost=False)

    # ---- the waiting queue

    def _place_waiting(self, now: float) -> Iterator[Action]:
        if not self._waiting:
            return
        yield from self._drop_late(now)
        for request, instance in self._policy.placements(now, self.steering.view):
            self._waiting.remove(request)
            yield self._admit(now, request, instance)

    def _drop_late(self, now: float) -> Iterator[Action]:
        if self._policy.drops_late:
            for request in self._waiting.late(now, self.requests):
                self._forget(request)
                yield Fail(request.number, _late(request))

    def _admit(self, now: float, request: RequestState, instance: Instance) -> Send:
        spec = request.spec
        self.steering.start_at(now, request, instance)
        instance.reserve(request.number, request.num_pages, len(request.canvas))
        request.instance = instance.name
        request.instances.append(instance.name)
        self.steering.placed(request, instance)
        return Send(
            instance.name,
            Admit(
                request=request.number,
                canvas=list(request.canvas),
                output_start=spec.output_start,
                output_end=spec.output_end,
                limit=spec.limit,
                decoding=replace(
                    spec.decoding, value=request.threshold, refresh_blocks=request.refresh_blocks
                ),
                steps_done=request.steps,
                steps_in_block=request.steps_in_block,
            ),
        )

    def _fail_waiting(self) -> Iterator[Action]:
        """Those that no instance will ever hold, now that more is known of the instances."""
        failure, most_pages = self.cluster.failure(), self.cluster.most_pages()
        for entry in self._waiting.entries():
            if not failure and entry.num_pages <= most_pages:
                continue
            request = self.requests[entry.number]
            error = (
                Unavailable(f"no model instance serves: {failure}") if failure else self._no_pages(request)
            )
            self._forget(request)
            yield Fail(request.number, error)

    # ---- the books

    def _evict(self, request: RequestState, instance: Instance | None = None) -> None:
        """`instance`: the one that holds it, where it is off the cluster's books already."""
        instance = instance or self.cluster.instances[request.instance or ""]
        instance.release(request.number)
        request.instance = request.moving_to = None
        self.steering.left(request, instance)

    def _forget(self, request: RequestState, finished_at: float | None = None) -> None:
        request.threshold_cap = self.steering.cap_of(request)
        if request.instance:
            self._evict(request)
        else:
            self._waiting.remove(request)
        self.steering.ended(request, finished_at)
        del self.requests[request.number]

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken."""
        self.cluster.check()
        self._waiting.check()
        self.steering.view.check()
        waiting = self._waiting.numbers()
        homes = {number: name for name, i in self.cluster.instances.items() for number in i.residents}
        assert sum(len(i.residents) for i in self.cluster.instances.values()) == len(homes), (
            "a request is in two places"
        )
        assert not homes.keys() & set(waiting), "a resident waits"
        assert self.requests.keys() == homes.keys() | set(waiting), (
            "a request is nowhere, or a ghost somewhere"
        )
        for number, request in self.requests.items():
            assert request.instance == homes.get(number), f"request {number} is not where it thinks"
            request.check()


def _late(request: RequestState) -> Unavailable:
    return Unavailable(
        f"the request's SLO of {request.spec.slo_s:g} s passed while it waited for room; "
        "send fewer requests, or set a longer slo_ms"
    )


def _lost_too_often(request: RequestState, reason: str) -> WorkerError:
    return WorkerError(
        f"{request.num_losses} instances were lost while they ran this request; last: {reason}"
    )
