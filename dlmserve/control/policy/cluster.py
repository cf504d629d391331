"""The nodes, their ranks, the instances formed of them, and what each instance has taken on.

Owns the wanted layout and the way there: which ranks form which instance, and what becomes of ranks and
instances when something dies. Knows nothing of requests beyond their number, pages and tokens, and
nothing of sockets: it names ranks, the caller talks to them.

A *slot* is one wanted instance; a *formation* is one attempt to fill it and has a name of its own
(`i<slot>.<attempt>`), so that whatever a dead formation still says is recognised by its name.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dlmserve.messages import Decoding

MAX_FAILURES = 3  # formations in a row that failed before a slot counts as hopeless
RETRY_S = 0.5  # wait before a failed formation is tried again; doubles up to
MAX_RETRY_S = 30.0


Device = tuple[str, int]  # node, number


class RankId(NamedTuple):
    """One rank process; `generation` counts the starts of its device's process."""

    node: str
    device: int
    generation: int

    @property
    def identity(self) -> str:
        """Its name on the wire."""
        return f"{self.node}:{self.device}:{self.generation}"


@dataclass
class Rank:
    """free -> busy (in a formation) -> leaving (the formation is lost) -> free; down from anywhere."""

    id: RankId
    plan_endpoint: str
    pid: int | None = None
    state: Literal["free", "busy", "leaving", "down"] = "free"
    instance: str = ""  # the formation it is in, or leaves
    tp_rank: int = -1
    left_at: float = 0.0  # since when it is leaving


@dataclass
class Slot:
    """`wanted`: part of the layout; a slot that is not may still hold an instance, until that is drained."""

    index: int
    tp_degree: int
    wanted: bool = True
    devices: tuple[Device, ...] = ()  # which to form it of the first time; (): any that are spare
    instance: str | None = None
    num_formations: int = 0
    num_failures: int = 0  # in a row
    retry_at: float = 0.0
    error: str = ""  # of the last failure
    num_pages: int | None = None  # of its last formation that served


class Residence(NamedTuple):
    num_pages: int
    num_tokens: int


@dataclass
class Instance:
    """A formation and the requests assigned to it."""

    name: str
    slot: Slot
    ranks: tuple[RankId, ...]  # by tp_rank
    max_num_seqs: int
    pages_by_rank: dict[int, int] = field(default_factory=dict)  # of the ranks that are ready
    serving: bool = False  # all ranks are
    draining: bool = False  # takes nothing new; gives each request back at its next block start
    num_pages: int = 0  # of the rank that has the fewest
    token_s: float = 0.0  # what a step takes at most, per packed token, on its slowest rank
    residents: dict[int, Residence] = field(default_factory=dict)
    num_pages_reserved: int = 0
    num_tokens: int = 0  # assigned: the canvases of its residents
    last_seq: int = -1

    @property
    def tp_degree(self) -> int:
        return len(self.ranks)

    def has_room(self, num_pages: int) -> bool:
        if self.draining or not self.serving or len(self.residents) >= self.max_num_seqs:
            return False
        return num_pages <= self.num_pages - self.num_pages_reserved

    def reserve(self, request: int, num_pages: int, num_tokens: int) -> None:
        self.residents[request] = Residence(num_pages, num_tokens)
        self.num_pages_reserved += num_pages
        self.num_tokens += num_tokens

    def release(self, request: int) -> None:
        residence = self.residents.pop(request)
        self.num_pages_reserved -= residence.num_pages
        self.num_tokens -= residence.num_tokens


class LostInstance(NamedTuple):
    instance: Instance
    survivors: tuple[RankId, ...]
    reason: str


class Cluster:
    """`layout`: the TP degrees wanted at the start. Methods that lose an instance return it."""

    def __init__(self, layout: tuple[int, ...], max_num_seqs: int, leave_timeout_s: float) -> None:
        self.slots = [Slot(index, degree) for index, degree in enumerate(layout)]
        self.nodes: dict[str, int] = {}  # number of devices
        self.ranks: dict[Device, Rank] = {}  # by node and device
        self.instances: dict[str, Instance] = {}
        self._early_exits: dict[Device, list[str]] = {}  # why processes died that never said hello
        self._max_num_seqs = max_num_seqs
        self._leave_timeout_s = leave_timeout_s

    # ---- what there is

    @property
    def layout(self) -> list[int]:
        """TP degrees of the wanted instances."""
        return [slot.tp_degree for slot in self.slots if slot.wanted]

    def serving(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.serving]

    def most_pages(self) -> float:
        """That some instance has in all, infinite where one may have any number once it is formed."""
        pages = (math.inf if slot.num_pages is None else slot.num_pages for slot in self.slots if slot.wanted)
        return max(pages, default=-1)

    def failure(self) -> str | None:
        """Why no instance serves and, by all that is known, none will; None while there is hope."""
        if any(instance.serving for instance in self.instances.values()):
            return None
        devices_of = {slot.index: devices for slot, devices in self._plan()}
        wanted = [slot for slot in self.slots if slot.wanted]
        reasons = [self._hopeless(slot, devices_of.get(slot.index, ())) for slot in wanted]
        return reasons[0] if all(reasons) else None

    def _hopeless(self, slot: Slot, devices: Sequence[Device]) -> str | None:
        if slot.num_failures >= MAX_FAILURES:
            return slot.error
        exits = (self._early_exits.get(device, []) for device in devices)
        return next((reasons[-1] for reasons in exits if len(reasons) >= MAX_FAILURES), None)

    # ---- nodes and ranks

    def add_node(self, node: str, num_devices: int) -> None:
        self.nodes[node] = num_devices

    def remove_node(self, node: str, now: float, reason: str) -> list[LostInstance]:
        self.nodes.pop(node, None)
        gone = [rank.id for rank in self.ranks.values() if rank.id.node == node]
        for id in gone:
            self.ranks[id[:2]].state = "down"
        names = {self.ranks[id[:2]].instance for id in gone}
        lost = [self.lose(name, now, f"node {node} is down: {reason}") for name in sorted(names)]
        for id in gone:
            del self.ranks[id[:2]]
        return [each for each in lost if each]

    def add_rank(self, id: RankId, plan_endpoint: str, pid: int | None, now: float) -> LostInstance | None:
        """A rank said hello; its device's older process, if still on the books, is gone then."""
        old = self.ranks.get(id[:2])
        if old and old.id.generation >= id.generation:
            return None
        lost = self.remove_rank(old.id, now, "another process took its place") if old else None
        self.ranks[id[:2]] = Rank(id, plan_endpoint, pid)
        self._early_exits.pop(id[:2], None)
        return lost

    def remove_rank(self, id: RankId, now: float, reason: str) -> LostInstance | None:
        """The rank is down; ignored where that is known already or an older process is meant."""
        rank = self.ranks.get(id[:2])
        reason = f"rank {id.identity} is down: {reason}"
        if rank is None or rank.id.generation < id.generation:
            self._early_exits.setdefault(id[:2], []).append(reason)
            return None
        if rank.id != id or rank.state == "down":
            return None
        rank.state = "down"
        return self.lose(rank.instance, now, reason)

    # ---- instances

    def form_missing(self, now: float) -> list[Instance]:
        """Starts a formation for every empty slot whose ranks are all free."""
        formed = []
        for slot, devices in self._plan():
            ranks = [self.ranks.get(device) for device in devices]
            if now >= slot.retry_at and all(rank and rank.state == "free" for rank in ranks):
                formed.append(self._form(slot, [rank for rank in ranks if rank]))
        return formed

    def _plan(self) -> list[tuple[Slot, Sequence[Device]]]:
        """Devices for each empty slot: its own where it has some; for the others the largest first (so that
        groups align), on the node they fill best."""
        empty = [slot for slot in self.slots if slot.wanted and slot.instance is None]
        plan: list[tuple[Slot, Sequence[Device]]] = [(slot, slot.devices) for slot in empty if slot.devices]
        spare = {node: self._spare_devices(node) for node in self.nodes}
        for slot in sorted(empty, key=lambda slot: -slot.tp_degree):
            nodes = [node for node in spare if len(spare[node]) >= slot.tp_degree]
            if nodes and not slot.devices:
                node = min(nodes, key=lambda node: len(spare[node]))
                plan.append((slot, spare[node][: slot.tp_degree]))
                spare[node] = spare[node][slot.tp_degree :]
        return plan

    def _spare_devices(self, node: str) -> list[Device]:
        """Devices in no formation and meant for none; those whose process died come last."""
        meant = {device for slot in self.slots for device in slot.devices}
        devices = [(node, device) for device in range(self.nodes[node]) if (node, device) not in meant]
        ranks = [(device, self.ranks.get(device)) for device in devices]
        spare = [(device, rank) for device, rank in ranks if rank is None or rank.state != "busy"]
        return [device for device, rank in sorted(spare, key=lambda pair: _is_down(pair[1]))]

    def add_slot(self, tp_degree: int, devices: tuple[Device, ...] = ()) -> None:
        """One more wanted instance; takes the place of a slot that is not used any more."""
        unused = (slot for slot in self.slots if not slot.wanted and slot.instance is None)
        slot = next(unused, None)
        if slot is None:
            self.slots.append(Slot(len(self.slots), tp_degree, devices=devices))
            return
        # The count of formations goes on: their names must never come again.
        fresh = Slot(slot.index, tp_degree, devices=devices, num_formations=slot.num_formations)
        self.slots[slot.index] = fresh

    def _form(self, slot: Slot, ranks: list[Rank]) -> Instance:
        slot.num_formations += 1
        name = f"i{slot.index}.{slot.num_formations}"
        for tp_rank, rank in enumerate(ranks):
            rank.state, rank.instance, rank.tp_rank = "busy", name, tp_rank
        slot.instance = name
        instance = Instance(name, slot, tuple(rank.id for rank in ranks), self._max_num_seqs)
        # By slot, not by who came first: of equal instances policies take the first.
        ordered = sorted([*self.instances.items(), (name, instance)], key=lambda item: item[1].slot.index)
        self.instances.clear()
        self.instances.update(ordered)
        return instance

    def rank_formed(self, name: str, tp_rank: int, num_pages: int, token_s: float) -> Instance | None:
        """One rank is ready; returns the instance when that makes it serve."""
        instance = self.instances.get(name)
        if instance is None:
            return None
        instance.pages_by_rank[tp_rank] = num_pages
        instance.token_s = max(instance.token_s, token_s)
        if instance.serving or len(instance.pages_by_rank) < instance.tp_degree:
            return None
        instance.serving, instance.num_pages = True, min(instance.pages_by_rank.values())
        instance.slot.num_failures = 0
        instance.slot.num_pages = instance.num_pages
        instance.slot.devices = ()
        return instance

    def rank_left(self, name: str, tp_rank: int, now: float, error: str) -> LostInstance | None:
        """A rank is out of its formation; the formation is lost with it if it was not already."""
        rank = self._find(name, tp_rank)
        if rank is None:
            return None
        rank.state = "free"
        return self.lose(name, now, error or "a rank left it")

    def _find(self, name: str, tp_rank: int) -> Rank | None:
        members = (rank for rank in self.ranks.values() if rank.state in ("busy", "leaving"))
        return next((rank for rank in members if (rank.instance, rank.tp_rank) == (name, tp_rank)), None)

    def lose(self, name: str, now: float, reason: str) -> LostInstance | None:
        """Takes the formation off the books; its ranks that still run are leaving."""
        instance = self.instances.pop(name, None)
        if instance is None:
            return None
        slot = instance.slot
        if not instance.serving:
            slot.num_failures += 1
            slot.error = reason
            slot.retry_at = now + min(MAX_RETRY_S, RETRY_S * 2 ** (slot.num_failures - 1))
        return LostInstance(instance, self._release_ranks(instance, now), reason)

    def dissolve(self, name: str, now: float) -> None:
        """Takes a drained instance off the books; its ranks are leaving."""
        instance = self.instances.pop(name)
        assert not instance.residents, f"{name} still holds requests"
        self._release_ranks(instance, now)

    def _release_ranks(self, instance: Instance, now: float) -> tuple[RankId, ...]:
        """Those that still run are leaving from now on."""
        instance.slot.instance = None
        survivors = []
        for id in instance.ranks:
            rank = self.ranks[id[:2]]
            if rank.state == "busy" and rank.instance == instance.name:
                rank.state, rank.left_at = "leaving", now
                survivors.append(id)
        return tuple(survivors)

    def stuck_ranks(self, now: float) -> list[RankId]:
        """Ranks that were told to leave a lost formation and did not; they are down from now on."""
        stuck = [
            rank
            for rank in self.ranks.values()
            if rank.state == "leaving" and now - rank.left_at > self._leave_timeout_s
        ]
        for rank in stuck:
            rank.state = "down"
        return [rank.id for rank in stuck]

    def check(self) -> None:
        """Raises AssertionError where the books contradict themselves."""
        for key, rank in self.ranks.items():
            assert key == rank.id[:2], f"rank {rank.id} is misplaced"
            assert (rank.state == "busy") == (rank.instance in self.instances), (
                f"{rank} and its instance differ"
            )
        for name, instance in self.instances.items():
            assert instance.slot.instance == name, f"{name} fills no slot"
            members = [self.ranks[id[:2]] for id in instance.ranks]
            assert [rank.id for rank in members] == list(instance.ranks), f"{name} holds a dead rank"
            assert [(rank.instance, rank.tp_rank) for rank in members] == [
                (name, tp_rank) for tp_rank in range(instance.slot.tp_degree)
            ], f"{name} and its ranks differ"
            assert len({id.node for id in instance.ranks}) == 1, f"{name} spans nodes"
            residences = instance.residents.values()
            assert instance.num_pages_reserved == sum(residence.num_pages for residence in residences)
            assert instance.num_tokens == sum(residence.num_tokens for residence in residences)
            assert instance.num_pages_reserved <= instance.num_pages, f"{name} is over-committed"
            assert len(instance.residents) <= instance.max_num_seqs, f"{name} has too many residents"
        filled = [slot.instance for slot in self.slots if slot.instance]
        assert sorted(filled) == sorted(self.instances), "slots and instances differ"


def pages_needed(num_tokens: int, page_size: int, decoding: Decoding) -> int:
    """KV pages of a canvas; without a KV cache none."""
    return math.ceil(num_tokens / page_size) if decoding.needs_pages else 0


def _is_down(rank: Rank | None) -> bool:
    return rank is not None and rank.state == "down"
