"""The pure state machine of the server: events in, actions out.

Owns every live request, the waiting queue and the cluster's books; asks the policy where a request goes
and with which threshold. Knows no clock (`now` is an argument), no sockets and no texts.

A request is in exactly one place: in the waiting queue, or resident on one instance. A report counts only
if it comes from the instance that holds the request, so nothing is ever applied or delivered twice.
"""

import bisect
from collections.abc import Iterator

from msgspec.structs import replace

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, Instance, LostInstance, pages_needed
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
    NodeLost,
    NodeUp,
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
from dlmserve.control.policy.policies import Policy
from dlmserve.control.policy.request import RequestState
from dlmserve.errors import ContextTooLong, DlmServeError, NotFinite, QueueFull, Unavailable, WorkerError
from dlmserve.messages import Admit, Cancel, RequestStep, StepReport

MAX_LOSSES = 3  # instances that may die under a request before it is taken for the cause


class Scheduler:
    """`on_event` is the only way in; `check` verifies every invariant."""

    def __init__(self, config: ServerConfig, policy: Policy, mask_id: int, max_model_len: int) -> None:
        self._config, self._policy = config, policy
        self._mask_id, self._max_model_len = mask_id, max_model_len
        self.cluster = Cluster(config.tp_layout, config.max_num_seqs, config.heartbeat_timeout_s)
        self.requests: dict[int, RequestState] = {}
        self._waiting: list[tuple[tuple, int]] = []  # (order, request number), sorted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def on_event(self, now: float, event: Event) -> list[Action]:
        """What is to be done now, in order. Unknown and outdated names are ignored."""
        match event:
            case StepDone(report):
                actions = self._step_done(now, report)
            case Arrived():
                actions = self._arrived(now, event)
            case Cancelled():
                actions = self._cancelled(now, event)
            case RankFormed(instance, tp_rank, pages):
                actions = self._rank_formed(instance, tp_rank, pages)
            case RankLeft(instance, tp_rank, error):
                actions = self._lost(self.cluster.rank_left(instance, tp_rank, now, error))
            case RankUp(rank, plan_endpoint):
                actions = self._lost(self.cluster.add_rank(rank, plan_endpoint, now))
            case RankLost():
                actions = self._rank_lost(now, event)
            case NodeUp(node, num_devices):
                actions = self._node_up(node, num_devices)
            case NodeLost(node, reason):
                actions = self._node_lost(now, node, reason)
            case Tick():
                actions = self._tick(now)
        done = list(actions)
        if not isinstance(event, StepDone | Arrived | Cancelled):
            done += self._reform(now)
        return done

    # ---- requests come and go

    def _arrived(self, now: float, event: Arrived) -> Iterator[Action]:
        decoding, length = event.spec.decoding, len(event.spec.canvas)
        pages = pages_needed(length, self._config.page_size, decoding.cache)
        request = RequestState(event.request, event.spec, now, self._mask_id, pages)
        error = self._refusal(request)
        if error:
            yield Reject(request.number, error)
            return
        self.requests[request.number] = request
        self._enqueue(request)
        yield from self._place_waiting()

    def _refusal(self, request: RequestState) -> DlmServeError | None:
        length, failure = len(request.canvas), self.cluster.failure()
        if length > self._max_model_len:
            return ContextTooLong(
                f"prompt and output need {length} tokens (whole blocks); the model's context has "
                f"{self._max_model_len}: shorten the prompt or ask for fewer tokens"
            )
        if not self.cluster.could_hold(request.num_pages):
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
        self._forget(request)
        yield Drop(request.number, event.outcome, request.summary(now))
        yield from self._place_waiting()

    def _step_done(self, now: float, report: StepReport) -> Iterator[Action]:
        instance = self.cluster.instances.get(report.instance)
        if instance is None or report.seq <= instance.last_seq:
            return
        instance.last_seq = report.seq
        num_residents = len(instance.residents)
        for step in report.requests:
            if step.request in instance.residents:
                yield from self._apply(now, step)
        for number, message in report.failed:
            if number in instance.residents:
                self._forget(self.requests[number])
                yield Fail(number, NotFinite(message))
        for number in report.released:
            if number in instance.residents:
                self._enqueue(self._evict(self.requests[number]))
        if len(instance.residents) < num_residents:
            yield from self._place_waiting()

    def _apply(self, now: float, step: RequestStep) -> Iterator[Action]:
        request = self.requests[step.request]
        yield Deliver(request.number, request.apply(step), now - request.arrived_at)
        if step.finished:
            self._forget(request)
            yield Finish(request.number, step.finished, request.summary(now))

    # ---- nodes, ranks and instances come and go

    def _rank_formed(self, name: str, tp_rank: int, pages: int) -> Iterator[Action]:
        if self.cluster.rank_formed(name, tp_rank, pages):
            yield from self._fail_waiting()
            yield from self._place_waiting()

    def _rank_lost(self, now: float, event: RankLost) -> Iterator[Action]:
        yield from self._lost(self.cluster.remove_rank(event.rank, now, event.reason))
        if not event.exited:
            yield RestartRank(event.rank, event.reason)

    def _node_up(self, node: str, num_devices: int) -> Iterator[Action]:
        self.cluster.add_node(node, num_devices)
        yield from ()

    def _node_lost(self, now: float, node: str, reason: str) -> Iterator[Action]:
        for lost in self.cluster.remove_node(node, now, reason):
            yield from self._lost(lost)

    def _tick(self, now: float) -> Iterator[Action]:
        for rank in self.cluster.stuck_ranks(now):
            yield RestartRank(rank, "it did not leave a lost instance")

    def _lost(self, lost: LostInstance | None) -> Iterator[Action]:
        """Its requests go on elsewhere from the head's own canvases, before any that have not started."""
        if lost is None:
            return
        leader = lost.instance.ranks[0]
        told = (leader,) if leader in lost.survivors else lost.survivors
        yield DissolveInstance(lost.instance.name, told, lost.reason)
        for number in list(lost.instance.residents):
            request = self.requests[number]
            lost.instance.release(number)
            request.instance = None
            request.num_losses += 1
            if request.num_losses < MAX_LOSSES:
                self._enqueue(request)
                continue
            del self.requests[number]
            yield Fail(number, _lost_too_often(request, lost.reason))
        yield from self._place_waiting()

    def _reform(self, now: float) -> Iterator[Action]:
        """After a change of the cluster: fills empty slots, gives up on what can no longer run."""
        for instance in self.cluster.form_missing(now):
            yield FormInstance(instance.name, instance.ranks)
        if self._waiting:
            yield from self._fail_waiting()

    # ---- the waiting queue

    def _enqueue(self, request: RequestState) -> None:
        # Who has started keeps its turn: nothing is preempted, not by a failure or a move either.
        order = (not request.started, -request.spec.priority, request.number)
        bisect.insort(self._waiting, (order, request.number))

    def _place_waiting(self) -> Iterator[Action]:
        """Places whoever fits, in order; one that does not fit does not hold up smaller ones."""
        no_room_from = float("inf")  # the smallest need for which no instance has room
        still_waiting = []
        for entry in self._waiting:
            request = self.requests[entry[1]]
            may_fit = request.num_pages < no_room_from
            instance = self._policy.place(request, self.cluster) if may_fit else None
            if instance is None:
                no_room_from = min(no_room_from, request.num_pages)
                still_waiting.append(entry)
            else:
                yield self._admit(request, instance)
        self._waiting = still_waiting

    def _admit(self, request: RequestState, instance: Instance) -> Send:
        spec = request.spec
        if not spec.pinned:
            request.threshold = max(self._policy.threshold(request), spec.min_threshold or 0.0)
        instance.reserve(request.number, request.num_pages, len(request.canvas))
        request.instance = instance.name
        request.instances.append(instance.name)
        return Send(
            instance.name,
            Admit(
                request=request.number,
                canvas=list(request.canvas),
                output_start=spec.output_start,
                output_end=spec.output_end,
                limit=spec.limit,
                decoding=replace(spec.decoding, value=request.threshold),
                steps_done=request.steps,
                steps_in_block=request.steps_in_block,
            ),
        )

    def _fail_waiting(self) -> Iterator[Action]:
        """Those that no instance will ever hold, now that more is known of the instances."""
        failure = self.cluster.failure()
        for _, number in list(self._waiting):
            request = self.requests[number]
            if failure:
                error: DlmServeError = Unavailable(f"no model instance serves: {failure}")
            elif not self.cluster.could_hold(request.num_pages):
                error = self._no_pages(request)
            else:
                continue
            self._forget(request)
            yield Fail(number, error)

    # ---- the books

    def _evict(self, request: RequestState) -> RequestState:
        assert request.instance is not None
        self.cluster.instances[request.instance].release(request.number)
        request.instance = None
        return request

    def _forget(self, request: RequestState) -> None:
        del self.requests[request.number]
        if request.instance:
            self._evict(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] != request.number]

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken."""
        self.cluster.check()
        waiting = [number for _, number in self._waiting]
        assert self._waiting == sorted(self._waiting), "the queue is out of order"
        assert len(waiting) == len(set(waiting)), "a request waits twice"
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


def _lost_too_often(request: RequestState, reason: str) -> WorkerError:
    return WorkerError(
        f"{request.num_losses} instances were lost while they ran this request; last: {reason}"
    )
