"""Whatever happens in whatever order, no request is lost, none ends twice, no token is delivered twice.

A toy cluster obeys the scheduler's actions; hypothesis chooses its layout, the length of the story and the
seed of what happens. What a rank says stays in order but is heard later, also long after it is dead.
"""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

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
from dlmserve.control.policy.policies import POLICIES
from dlmserve.messages import Admit, Cancel, Command, Decoding, Failure, Release, RequestStep
from tests.story import BLOCK, MASK, PAGE, Story, make_report, make_spec, make_step

NUM_PAGES = 12


def token_at(request: int, position: int) -> int:
    return (7 * request + position) % MASK


class ToyInstance:
    """A worker's side of one formation: residents, their canvases, and the steps it runs."""

    def __init__(self, name: str, ranks: tuple[RankId, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.formed = False
        self.seq = 0
        self.inbox: deque[Command] = deque()
        self.residents: dict[int, Admit] = {}
        self.canvases: dict[int, list[int]] = {}
        self.asked_back: set[int] = set()

    def obey(self) -> None:
        while self.inbox:
            match self.inbox.popleft():
                case Admit() as admit:
                    assert admit.request not in self.residents, "admitted twice"
                    self.residents[admit.request] = admit
                    self.canvases[admit.request] = list(admit.canvas)
                    cached = [a for a in self.residents.values() if a.decoding.cache != "none"]
                    assert sum(-(-len(a.canvas) // PAGE) for a in cached) <= NUM_PAGES, "over-committed"
                case Cancel(request):
                    self.residents.pop(request, None)
                case Release(request):
                    self.asked_back.add(request)

    def step(self, num_unmasked: int, broken: bool = False) -> StepDone:
        """Unmasks up to `num_unmasked` positions of each resident; `broken`: but the first one's are NaN."""
        self.obey()
        self.seq += 1
        failed = [Failure(number, "not_finite", "NaN") for number in list(self.residents)[:broken]]
        released = [n for n in self.residents if n in self.asked_back and self._at_block_start(n)]
        for number in [*released, *(failure.request for failure in failed)]:
            self.residents.pop(number, None)
        steps = [self._step_of(admit, num_unmasked) for admit in list(self.residents.values())]
        self.asked_back.clear()
        return StepDone(make_report(self.name, self.seq, *steps, failed=failed, released=released))

    def _step_of(self, admit: Admit, num_unmasked: int) -> RequestStep:
        canvas = self.canvases[admit.request]
        masked = [column for column in range(admit.output_start, admit.output_end) if canvas[column] == MASK]
        block = (masked[0] - admit.output_start) // BLOCK
        chosen = [column for column in masked if (column - admit.output_start) // BLOCK == block][
            :num_unmasked
        ]
        tokens = {column: token_at(admit.request, column) for column in chosen}
        for column, token in tokens.items():
            canvas[column] = token
        if len(chosen) < len(masked):
            return make_step(admit.request, tokens, block=block)
        del self.residents[admit.request]
        return make_step(admit.request, tokens, block=block, finished="length")

    def _at_block_start(self, number: int) -> bool:
        return (self.canvases[number].index(MASK) - PAGE) % BLOCK == 0


class ToyCluster:
    """Processes, their mail, and the account of what clients were told."""

    def __init__(self, layout: tuple[int, ...], random: random.Random, policy: str) -> None:
        self.story = Story(tp_layout=layout, max_num_seqs=3, max_queue=4, policy=policy)
        self.layout = list(layout)
        self.random, self.now = random, 0.0
        self.formations: dict[str, ToyInstance] = {}  # alive, in the workers' eyes
        self.mail: dict[RankId, deque[Event]] = {}  # said by a rank, not yet heard
        self.generations: dict[int, int] = {}
        self.submitted: set[int] = set()
        self.ended: dict[int, Action] = {}
        self.delivered: dict[int, dict[int, int]] = {}
        self.feed(NodeUp("n", sum(layout)))
        for device in range(sum(layout)):
            self.start_process(device)

    # ---- what obeys the scheduler

    def feed(self, event: Event) -> None:
        for action in self.story.at(self.now, event):
            match action:
                case Send(name, command):
                    if name in self.formations:
                        self.formations[name].inbox.append(command)
                case FormInstance(name, ranks):
                    self.formations[name] = ToyInstance(name, ranks)
                case DissolveInstance(name, told):
                    self.dissolve(name, told)
                case RestartRank(rank):
                    self.kill(rank)
                case Deliver(request, update):
                    assert request not in self.ended, "delivered after its end"
                    tokens = {unmasked.position: unmasked.token for unmasked in update.unmasked}
                    seen = self.delivered.setdefault(request, {})
                    assert not seen.keys() & tokens.keys(), "a token was delivered twice"
                    seen.update(tokens)
                case Finish(request) | Fail(request) | Drop(request) | Reject(request):
                    assert request not in self.ended, "ended twice"
                    self.ended[request] = action
        if self.story.config.policy != "dlmserve":  # which may keep requests waiting for a better batch
            self.nobody_waits_who_would_fit()

    def nobody_waits_who_would_fit(self) -> None:
        instances = self.story.scheduler.cluster.instances.values()
        for request in self.story.scheduler.requests.values():
            fitting = [i.name for i in instances if i.has_room(request.num_pages)]
            assert request.instance or not fitting, f"request {request.number} waits but fits in {fitting}"

    def dissolve(self, name: str, told: tuple[RankId, ...]) -> None:
        formation = self.formations.pop(name, None)
        for tp_rank, rank in enumerate(formation.ranks if formation and told else ()):
            if self.is_alive(rank) and self.random.random() < 0.8:  # or it is stuck, to be killed later
                self.mail[rank].append(RankLeft(name, tp_rank, ""))

    def start_process(self, device: int) -> None:
        generation = self.generations[device] = self.generations.get(device, 0) + 1
        rank = RankId("n", device, generation)
        self.mail[rank] = deque([RankUp(rank, "plan")])

    def is_alive(self, rank: RankId) -> bool:
        return self.generations[rank.device] == rank.generation

    def kill(self, rank: RankId) -> None:
        if self.is_alive(rank):
            self.formations = {name: f for name, f in self.formations.items() if rank not in f.ranks}
            self.mail[rank].append(RankLost(rank, "the agent says so", exited=True))
            self.start_process(rank.device)

    # ---- what may happen

    def arrive(self) -> None:
        number = len(self.submitted) + 1
        self.submitted.add(number)
        decoding = Decoding(block_length=BLOCK, cache=self.random.choice(["dual", "dual", "none"]))
        spec = make_spec(
            self.random.randint(1, 4),
            priority=self.random.randint(0, 1),
            decoding=decoding,
            slo_s=self.random.choice([None, 0.5, 30.0]),
            min_threshold=self.random.choice([None, 0.7]),
            pinned=self.random.random() < 0.1,
        )
        self.feed(Arrived(number, spec))

    def cancel(self) -> None:
        if self.submitted:
            self.feed(Cancelled(self.random.choice(sorted(self.submitted)), "abandoned"))

    def step(self) -> None:
        for formation in self.pick_formed():
            broken = self.random.random() < 0.03
            self.mail[formation.ranks[0]].append(formation.step(self.random.randint(1, BLOCK), broken))

    def ask_back(self) -> None:
        for formation in self.pick_formed():
            formation.inbox.extend(Release(number) for number in list(formation.residents)[:1])

    def pick_formed(self) -> list[ToyInstance]:
        formed = [formation for formation in self.formations.values() if formation.formed]
        return [self.random.choice(formed)] if formed else []

    def hear(self) -> None:
        mail = self.random.choice(list(self.mail.values()))
        if mail:
            self.feed(mail.popleft())

    def hear_the_living(self) -> None:
        for rank, mail in list(self.mail.items()):
            while mail and self.is_alive(rank):
                self.feed(mail.popleft())

    def form(self, failing: float = 0.2) -> None:
        for formation in [formation for formation in self.formations.values() if not formation.formed]:
            formation.formed = self.random.random() >= failing
            if not formation.formed:
                del self.formations[formation.name]
            for tp_rank, rank in enumerate(formation.ranks):
                left = RankLeft(formation.name, tp_rank, "failed")
                self.mail[rank].append(
                    RankFormed(formation.name, tp_rank, NUM_PAGES) if formation.formed else left
                )

    def lose_rank(self) -> None:
        device, exited = self.random.choice(list(self.generations)), self.random.random() < 0.5
        rank = RankId("n", device, self.generations[device])
        if exited:
            self.kill(rank)
        self.feed(RankLost(rank, "lost", exited))

    def pass_time(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 20.0])
        self.feed(Tick())

    def reconfigure(self) -> None:
        """To any layout of these devices; not all of them need be in use."""
        left, layout = len(self.generations), []
        while left and (not layout or self.random.random() < 0.8):
            layout.append(self.random.choice([degree for degree in (1, 2, 4) if degree <= left]))
            left -= layout[-1]
        self.layout = layout
        self.feed(LayoutWanted(tuple(layout)))

    def anything(self) -> None:
        weights = {
            self.step: 10, self.hear: 10, self.hear_the_living: 3, self.arrive: 4, self.form: 2,
            self.pass_time: 2, self.ask_back: 1, self.lose_rank: 1, self.cancel: 0.3,
            self.reconfigure: 0.3,
        }  # fmt: skip
        self.random.choices(list(weights), list(weights.values()))[0]()

    def end_in_peace(self) -> None:
        for _ in range(100):
            self.now += 40.0
            self.feed(Tick())
            self.hear_the_living()
            self.form(failing=0)
            for formation in self.formations.values():
                self.mail[formation.ranks[0]].append(formation.step(BLOCK))


@given(
    st.sampled_from([(1,), (1, 1), (2, 1), (2, 1, 1)]),
    st.integers(0, 2**32),
    st.integers(1, 400),
    st.sampled_from(sorted(POLICIES)),
)
@settings(max_examples=60)
def test_every_request_ends_once_and_every_token_is_delivered_once(
    layout: tuple[int, ...], seed: int, num_events: int, policy: str
) -> None:
    cluster = ToyCluster(layout, random.Random(seed), policy)
    for _ in range(num_events):
        cluster.anything()
    cluster.end_in_peace()
    assert cluster.ended.keys() == cluster.submitted, "a request was lost"
    serving = cluster.story.scheduler.cluster.serving()
    assert sorted(i.tp_degree for i in serving) == sorted(cluster.layout), "the wanted layout is not there"
    assert not cluster.story.scheduler.transition.active
    for number, end in cluster.ended.items():
        if isinstance(end, Finish):
            tokens = cluster.delivered[number]
            assert tokens == {position: token_at(number, position) for position in tokens}
            assert len(tokens) == end.summary.num_unmasked and len(tokens) % BLOCK == 0
