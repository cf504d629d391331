"""Whatever happens in whatever order, no request is lost, none ends twice, no token is delivered twice.

A toy cluster obeys the scheduler's actions; hypothesis chooses what happens next. What workers say travels in
order per rank but arrives when hypothesis wants it to, also long after the worker is dead.
"""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlmserve.control.policy.cluster import RankId, num_pages
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
from dlmserve.messages import Admit, Cancel, Command, Decoding, Release, RequestStep
from tests.story import BLOCK, MASK, PAGE, Story, make_report, make_spec, make_step

NUM_PAGES = 12


def token_at(request: int, position: int) -> int:
    return (7 * request + position) % MASK


class ToyInstance:
    """A worker's side of one formation: residents, their canvases, and the steps it runs."""

    def __init__(self, name: str, ranks: tuple[RankId, ...]) -> None:
        self.name, self.ranks = name, ranks
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
                    assert self.num_pages() <= NUM_PAGES, "over-committed"
                case Cancel(request):
                    self.residents.pop(request, None)
                case Release(request) if request in self.residents:
                    self.asked_back.add(request)

    def num_pages(self) -> int:
        cached = [admit for admit in self.residents.values() if admit.decoding.cache != "none"]
        return sum(-(-len(admit.canvas) // PAGE) for admit in cached)

    def step(self, num_unmasked: int, broken: bool) -> StepDone:
        """Unmasks up to `num_unmasked` positions of each resident; `broken`: but the first one's are NaN."""
        self.obey()
        self.seq += 1
        failed = [(number, "NaN") for number in list(self.residents)[:broken]]
        for number, _ in failed:
            del self.residents[number]
        steps = [self._step_of(admit, num_unmasked) for admit in list(self.residents.values())]
        released = [
            number for number in self.residents if number in self.asked_back and self._at_block(number)
        ]
        for number in released:
            del self.residents[number]
            self.asked_back.discard(number)
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

    def _at_block(self, number: int) -> bool:
        admit, canvas = self.residents[number], self.canvases[number]
        return (canvas.index(MASK, admit.output_start) - admit.output_start) % BLOCK == 0


class ToyCluster(RuleBasedStateMachine):
    @initialize(layout=st.sampled_from([(1,), (1, 1), (2, 1), (2, 1, 1)]))
    def start(self, layout: tuple[int, ...]) -> None:
        self.story = Story(tp_layout=layout, max_num_seqs=3, max_queue=4)
        self.now = 0.0
        self.formations: dict[str, ToyInstance] = {}  # told to form, alive in the workers' eyes
        self.mail: dict[RankId, deque[Event]] = {}  # said by a rank, not yet heard
        self.generations: dict[int, int] = {}
        self.submitted: set[int] = set()
        self.ended: dict[int, Action] = {}
        self.delivered: dict[int, dict[int, int]] = {}
        self.feed(NodeUp("n", sum(layout)))
        for device in range(sum(layout)):
            self.start_process(device)
        self.settle()
        self.settle()

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
                    seen = self.delivered.setdefault(request, {})
                    for unmasked in update.unmasked:
                        assert unmasked.position not in seen, "a token was delivered twice"
                        assert unmasked.token == token_at(request, unmasked.position)
                        seen[unmasked.position] = unmasked.token
                case Finish(request) | Fail(request) | Drop(request) | Reject(request):
                    assert request not in self.ended, "ended twice"
                    self.ended[request] = action

    def dissolve(self, name: str, told: tuple[RankId, ...]) -> None:
        formation = self.formations.pop(name, None)
        if formation is None or not told:
            return
        for tp_rank, rank in enumerate(formation.ranks):
            if self.generations[rank.device] == rank.generation:
                self.mail[rank].append(RankLeft(name, tp_rank, ""))

    def start_process(self, device: int) -> None:
        generation = self.generations[device] = self.generations.get(device, 0) + 1
        rank = RankId("n", device, generation)
        self.mail[rank] = deque([RankUp(rank, "plan")])

    def kill(self, rank: RankId) -> None:
        if self.generations[rank.device] == rank.generation:
            self.formations = {name: f for name, f in self.formations.items() if rank not in f.ranks}
            self.start_process(rank.device)

    # ---- what happens

    @rule(num_blocks=st.integers(1, 4), priority=st.integers(0, 1), cached=st.booleans())
    def arrive(self, num_blocks: int, priority: int, cached: bool) -> None:
        number = len(self.submitted) + 1
        self.submitted.add(number)
        decoding = Decoding(block_length=BLOCK, cache="dual" if cached else "none")
        self.feed(Arrived(number, make_spec(num_blocks, priority=priority, decoding=decoding)))

    @precondition(lambda self: self.story.scheduler.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.feed(Cancelled(data.draw(st.sampled_from(sorted(self.story.scheduler.requests))), "abandoned"))

    @precondition(lambda self: self.formations)
    @rule(data=st.data(), num_unmasked=st.integers(1, BLOCK), broken=st.sampled_from([False] * 9 + [True]))
    def step(self, data: st.DataObject, num_unmasked: int, broken: bool) -> None:
        formation = data.draw(st.sampled_from(list(self.formations.values())))
        if formation.inbox or formation.residents:
            self.mail[formation.ranks[0]].append(formation.step(num_unmasked, broken))

    @precondition(lambda self: self.formations)
    @rule(data=st.data())
    def ask_back(self, data: st.DataObject) -> None:
        formation = data.draw(st.sampled_from(list(self.formations.values())))
        for number in list(formation.residents)[:1]:
            formation.inbox.append(Release(number))

    @precondition(lambda self: any(self.mail.values()))
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank, mail in self.mail.items() if mail]))
        self.feed(self.mail[rank].popleft())

    @rule()
    def settle(self) -> None:
        """Whoever lives is heard, and whatever forms is formed; the dead may still be heard later."""
        for device, generation in list(self.generations.items()):
            mail = self.mail[RankId("n", device, generation)]
            while mail:
                self.feed(mail.popleft())
        for formation in list(self.formations.values()):
            for tp_rank in range(len(formation.ranks)):
                self.feed(RankFormed(formation.name, tp_rank, NUM_PAGES))

    @precondition(lambda self: self.formations)
    @rule(data=st.data(), works=st.sampled_from([True] * 4 + [False]))
    def finish_forming(self, data: st.DataObject, works: bool) -> None:
        formation = data.draw(st.sampled_from(list(self.formations.values())))
        for tp_rank, rank in enumerate(formation.ranks):
            formed = RankFormed(formation.name, tp_rank, NUM_PAGES)
            self.mail[rank].append(formed if works else RankLeft(formation.name, tp_rank, "failed"))
        if not works:
            del self.formations[formation.name]

    @rule(data=st.data(), exited=st.booleans())
    def lose_rank(self, data: st.DataObject, exited: bool) -> None:
        device = data.draw(st.sampled_from(sorted(self.generations)))
        rank = RankId("n", device, self.generations[device])
        if exited:
            self.kill(rank)
        self.feed(RankLost(rank, "lost", exited))

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @invariant()
    def nobody_waits_who_would_fit(self) -> None:
        if not hasattr(self, "story"):
            return
        scheduler = self.story.scheduler
        for request in scheduler.requests.values():
            need = num_pages(len(request.canvas), PAGE, request.spec.decoding.cache)
            fitting = [i.name for i in scheduler.cluster.instances.values() if i.has_room(need)]
            assert request.instance or not fitting, f"request {request.number} waits but fits in {fitting}"

    # ---- in the end

    def teardown(self) -> None:
        """Left in peace, everything that is still there comes to its end."""
        if not hasattr(self, "story"):
            return
        for _ in range(200):
            if not self.story.scheduler.requests:
                break
            self.pass_time(40.0)
            self.settle()
            for formation in self.formations.values():
                self.mail[formation.ranks[0]].append(formation.step(BLOCK, broken=False))
        assert self.ended.keys() == self.submitted, "a request was lost"
        for number, end in self.ended.items():
            if isinstance(end, Finish):
                num_tokens = len(self.delivered[number])
                assert num_tokens == end.summary.num_unmasked and num_tokens % BLOCK == 0


ToyCluster.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestToyCluster = ToyCluster.TestCase
