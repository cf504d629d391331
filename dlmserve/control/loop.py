"""The head: turns sockets and the clock into events, and the scheduler's actions into messages.

The only reader of the clock on this side. Decides nothing: what happens next is `policy/scheduler.py`'s
business. Everything here runs on one asyncio loop; sinks are called on it.
"""

import asyncio
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace

from dlmserve.checkpoint import ModelInfo
from dlmserve.config import ServerConfig
from dlmserve.control.links import Links
from dlmserve.control.liveness import Liveness, Peer, sender, step_limit_s
from dlmserve.control.metrics import Metrics
from dlmserve.control.node import LocalAgent, find_device
from dlmserve.control.observer import Observer
from dlmserve.control.planner import PlannerProcess
from dlmserve.control.policy.cluster import RankId
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
    MakePlan,
    NodeLost,
    Predict,
    RankLost,
    Reject,
    RestartRank,
    Send,
    Tick,
)
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.request import CancelOutcome, RequestSpec, Sink, Summary
from dlmserve.control.policy.scheduler import TICK_S, Scheduler
from dlmserve.control.predictor import make_predictor
from dlmserve.control.predictor_files import choose_predictor
from dlmserve.control.wire import LOCAL_NODE, FormMaker, agent_identity, to_event
from dlmserve.errors import ConfigError, RequestError, Unavailable, WorkerError
from dlmserve.keys import read as read_keys
from dlmserve.messages import (
    AgentHello,
    Dissolve,
    Formed,
    Message,
    NodeLeft,
    RankExited,
    Shutdown,
    StepReport,
    ToHead,
)
from dlmserve.messages import RestartRank as RestartRankMessage

STOP_S = 5.0  # for an agent and its ranks to end when asked to

log = logging.getLogger("dlmserve.head")


class Head:
    """One per server. `start()` and everything after it belong to one running asyncio loop."""

    def __init__(self, config: ServerConfig, info: ModelInfo, metrics: Metrics) -> None:
        divisors = tuple(degree for degree in config.tp_degrees if info.num_heads % degree == 0)
        config = replace(config, tp_degrees=divisors)
        self._config, self._info = config, info
        max_model_len = config.max_model_len or info.max_model_len
        policy = make_policy(config)
        self.predictor_choice = choose_predictor(config, policy, info.path)
        self._predictor = make_predictor(self.predictor_choice, config.thresholds, self._feed)
        self._planner = PlannerProcess(self._feed) if config.reconfigure_every_s else None
        self._scheduler = Scheduler(
            config,
            policy,
            info.mask_id,
            max_model_len,
            asks_predictor=self._predictor is not None,
            eos_ids=info.eos_ids,
        )
        self._observer = Observer(self._scheduler, config, metrics)
        self._forms = FormMaker(config, info, self.predictor_choice.hidden_reader)
        self._metrics = metrics
        self._agent: LocalAgent | None = None
        self._sinks: dict[int, Sink] = {}
        self._numbers = itertools.count(1)
        self._pending: deque[Action] = deque()  # decided, not yet performed
        self._performing = False
        self._peers: Liveness[Peer] = Liveness()
        self._steps: Liveness[str] = Liveness()  # of instances, by name
        self._ticked_at = 0.0
        self._idle = True  # nothing has happened since the last tick
        self._ready: asyncio.Future[None] | None = None  # None: not started
        self.draining = False

    # ---- life

    async def start(self) -> None:
        """Listens, starts this machine's agent, begins to form the layout; raises ConfigError."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ticked_at = time.monotonic()
        self._run_dir = self._config.run_dir or tempfile.mkdtemp(prefix="dlmserve-")
        endpoint = f"ipc://{self._run_dir}/head.sock"
        try:
            keys = read_keys(self._config.keys, "head") if self._config.keys else None
            self._links = Links(endpoint, self._config.listen, keys, self._on_message)
        except ConfigError:
            self._remove_run_dir()
            raise
        if self._config.num_devices:
            self._agent = LocalAgent(self._agent_command(endpoint), self._on_agent_exit)
            self._agent.start()
        if self._predictor:
            self._predictor.start()
        if self._planner:
            self._planner.start()
        self._ticking = asyncio.create_task(self._tick_forever())

    def _agent_command(self, endpoint: str) -> list[str]:
        command = [sys.executable, "-m", "dlmserve.worker.agent", "--head", endpoint, "--node", LOCAL_NODE]
        command += ["--devices", str(self._config.num_devices), "--device", find_device(self._config.device)]
        return [*command, "--run-dir", self._run_dir]

    async def wait_ready(self) -> None:
        """Returns when the first instance serves. Raises WorkerError when none ever will."""
        assert self._ready, "start() comes first"
        await asyncio.shield(self._ready)

    @property
    def ready(self) -> bool:
        return bool(self._scheduler.cluster.serving()) and not self.draining

    def cluster(self) -> dict:
        """What there is and what it does, for people and tools; JSON types only."""
        return self._observer.describe() | {"ready": self.ready, "draining": self.draining}

    @property
    def capacity(self) -> int:
        """Requests that the wanted instances hold at once."""
        return self._config.max_num_seqs * len(self._scheduler.cluster.layout)

    def want_layout(self, layout: list[int]) -> None:
        """Begins to change the instances to these TP degrees. Raises RequestError where that cannot be."""
        for degree in layout:
            if degree < 1 or self._info.num_heads % degree:
                raise RequestError(
                    f"the layout has TP degree {degree}; wanted divisors of the model's "
                    f"{self._info.num_heads} heads",
                    "layout",
                )
        if refusal := self._scheduler.transition.refusal(layout):
            raise refusal
        log.info("layout wanted: TP degrees %s", ",".join(map(str, layout)))
        self._feed(LayoutWanted(tuple(layout)))

    async def drain(self, limit_s: float) -> None:
        """Refuses new requests; returns when the others are done, or after `limit_s`."""
        self.draining = True
        end_at = time.monotonic() + limit_s
        while self._scheduler.requests and time.monotonic() < end_at:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Ends all processes; requests that still run are told so."""
        self.draining = True
        for number in list(self._sinks):
            sink = self._sinks.pop(number)
            _tell(sink.on_error, Unavailable("the server stops"))
        self._ticking.cancel()
        await self._links.stop_receiving()
        if self._predictor:
            self._predictor.stop()
        if self._planner:
            await self._planner.stop()
        if self._agent:  # nodes that joined wait for the next head
            can_be_asked = LOCAL_NODE in self._scheduler.cluster.nodes  # it has said hello
            if can_be_asked:
                self._links.send(agent_identity(LOCAL_NODE), Shutdown())
            await self._agent.stop(STOP_S if can_be_asked else 0.0)
        self._links.close()
        self._remove_run_dir()

    def _remove_run_dir(self) -> None:
        if self._config.run_dir is None:
            shutil.rmtree(self._run_dir, ignore_errors=True)

    # ---- requests

    def submit(self, spec: RequestSpec, sink: Sink) -> int:
        """The request's number. Raises QueueFull, Unavailable, ContextTooLong."""
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests")
        if self._ready is None or not self._ready.done() or self._ready.exception():
            raise Unavailable("no model instance serves yet; GET /ready says when one does")
        number = next(self._numbers)
        self._sinks[number] = sink
        for action in self._feed(Arrived(number, spec)):
            if isinstance(action, Reject):
                raise action.error
        return number

    def cancel(self, request: int, outcome: CancelOutcome) -> Summary | None:
        """Drops a request; its sink hears nothing from now on. None where it is over already."""
        if self._sinks.pop(request, None) is None:
            return None
        actions = self._feed(Cancelled(request, outcome))
        ends = (action for action in [*actions, *self._pending] if isinstance(action, Drop | Finish))
        return next((end.summary for end in ends if end.request == request), None)

    # ---- events in

    def _on_message(self, message: ToHead) -> None:
        now = time.monotonic()
        if peer := sender(message):
            self._peers.hear(peer, now)
        match message:
            case AgentHello(_, node) if node == LOCAL_NODE and self._agent:
                self._agent.greeted()
            case AgentHello(_, node, num_devices):
                log.info("node %s joins with %d devices", node, num_devices)
            case NodeLeft(node, reason):
                self._lose_node(node, reason)
                return
            case StepReport():
                self._steps.hear(message.instance, now)
                self._observer.on_report(message)
            case RankExited(node, device, generation, reason):
                log.warning("rank %s:%d:%d ended: %s", node, device, generation, reason)
                self._metrics.rank_restarts_total.inc()
            case Formed(instance, 0, num_pages, load_s, details):
                log.info(
                    "instance %s: %d KV pages, %s, ready in %.1f s", instance, num_pages, details, load_s
                )
        event = to_event(message)
        if event:
            self._feed(event)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(time.monotonic())
            except Exception:
                log.exception("the periodic check failed; going on")

    def _tick(self, now: float) -> None:
        late_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        if late_s > TICK_S:
            self._peers.forgive(late_s)
            self._steps.forgive(late_s)
        if self._idle:
            self._scheduler.check()
        self._lose_silent(now)
        self._lose_hung(now)
        self._feed(Tick())
        self._idle = True

    def _lose_silent(self, now: float) -> None:
        cluster = self._scheduler.cluster
        ranks = [rank.id for rank in cluster.ranks.values() if rank.state != "down"]
        limit_s = self._config.heartbeat_timeout_s
        for peer, silent_s in self._peers.silent(dict.fromkeys([*cluster.nodes, *ranks], limit_s), now):
            reason = f"no heartbeat for {silent_s:.1f} s"
            if not isinstance(peer, RankId):
                self._lose_node(peer, reason)
            elif peer[:2] in cluster.ranks and self._peers.silence_s(peer.node, now) <= limit_s / 2:
                # Not gone with its node just now, and not merely unheard because its whole node is.
                self._feed(RankLost(peer, reason, exited=False))

    def _lose_node(self, node: str, reason: str) -> None:
        log.error("node %s is lost: %s", node, reason)
        self._links.forget(node)
        self._feed(NodeLost(node, reason))
        if node == LOCAL_NODE and self._agent:
            self._agent.kill()

    def _lose_hung(self, now: float) -> None:
        """Heartbeats come from threads of their own: a rank may send them and hang inside a step."""
        busy = [instance for instance in self._scheduler.cluster.serving() if instance.residents]
        limits_s = {instance.name: step_limit_s(instance, self._config.step_timeout_s) for instance in busy}
        for name, silent_s in self._steps.silent(limits_s, now):
            for rank in self._scheduler.cluster.instances[name].ranks:  # nobody can say which one hangs
                self._feed(RankLost(rank, f"no step for {silent_s:.1f} s", exited=False))

    def _on_agent_exit(self, reason: str, hopeless: bool) -> None:
        log.error("%s; starting it again", reason)
        self._links.forget(LOCAL_NODE)
        self._feed(NodeLost(LOCAL_NODE, reason))
        if hopeless and self._ready and not self._ready.done():
            self._ready.set_exception(
                WorkerError(f"{reason} again and again before it could serve; see its log")
            )

    def _feed(self, event: Event) -> list[Action]:
        """The event's own actions; they are performed after those of earlier events."""
        self._idle = False
        actions = self._scheduler.on_event(time.monotonic(), event)
        self._pending.extend(actions)
        if not self._performing:
            self._perform_pending()
        return actions

    def _perform_pending(self) -> None:
        # Performing may cause events (a sink cancels, a peer is gone): their actions queue up behind.
        self._performing = True
        try:
            while self._pending:
                self._perform(self._pending.popleft())
        finally:
            self._performing = False
        self._settle_ready()

    def _settle_ready(self) -> None:
        cluster = self._scheduler.cluster
        if self._ready is None or self._ready.done():
            return
        if cluster.serving():
            self._ready.set_result(None)
        elif failure := cluster.failure():
            self._ready.set_exception(WorkerError(failure))

    # ---- actions out

    def _perform(self, action: Action) -> None:
        self._observer.on_action(action)
        match action:
            case Deliver(request, update):
                if sink := self._sinks.get(request):
                    _tell(sink.on_step, update)
            case Finish(request, reason, summary):
                if sink := self._sinks.pop(request, None):
                    _tell(sink.on_finish, reason, summary)
            case Fail(request, error):
                if sink := self._sinks.pop(request, None):
                    _tell(sink.on_error, error)
            case Reject(request):
                self._sinks.pop(request, None)
            case Send(name, command):
                instance = self._scheduler.cluster.instances.get(name)
                if instance:
                    self._send_rank(instance.ranks[0], command)
            case Predict(progress):
                if self._predictor:
                    self._predictor.ask(progress)
            case MakePlan(problem):
                if self._planner:
                    self._planner.ask(problem)
            case FormInstance(instance, ranks):
                log.info("forming instance %s of %s", instance, ", ".join(rank.identity for rank in ranks))
                for rank, form in self._forms.forms(action, self._scheduler.cluster):
                    self._send_rank(rank, form)
            case DissolveInstance(instance, told, reason, lost):
                log.warning("instance %s is %s: %s", instance, "lost" if lost else "dissolved", reason)
                for rank in told:
                    self._send_rank(rank, Dissolve(instance))
            case RestartRank(rank, reason):
                log.error("restarting rank %s: %s", rank.identity, reason)
                self._links.send(agent_identity(rank.node), RestartRankMessage(*rank))

    def _send_rank(self, rank: RankId, message: Message) -> None:
        if not self._links.send(rank.identity, message):
            self._feed(RankLost(rank, "it takes no messages", exited=False))


def _tell(tell, *args) -> None:
    """A sink's bug must not take the other requests down."""
    try:
        tell(*args)
    except Exception:
        log.exception("a request's consumer failed")
