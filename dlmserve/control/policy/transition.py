"""From the instances there are to the layout that is wanted, while requests run.

Owns the order of a change: one new instance at a time, before it only those instances drained whose devices it
takes, surplus ones last. The cluster's books say at any time how far it is, so a rank or a node that is lost on
the way only means to look again. Knows nothing of requests: the caller asks them back and tells the ranks.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from dlmserve.control.policy.cluster import Cluster, Device, Instance, Slot
from dlmserve.control.policy.movement import least_movement
from dlmserve.errors import RequestError


class Placement(NamedTuple):
    """`kept`: names of running instances; `new`: the devices of each one to be formed."""

    kept: tuple[str, ...]
    new: tuple[tuple[Device, ...], ...]


Place = Callable[[Sequence[int], Mapping[str, int], Mapping[str, Sequence[Device]], Set[Device]], Placement]


def place(
    layout: Sequence[int],
    nodes: Mapping[str, int],
    running: Mapping[str, Sequence[Device]],
    avoid: Set[Device] = frozenset(),
) -> Placement:
    """Where the layout's instances go; what does not fit is left out. Keeps what runs where it can.

    layout: TP degrees, powers of two; nodes: number of devices; running: the devices of each instance, in order
    of preference; avoid: devices to take last.
    """
    present = [(devices[0][0], len(devices)) for devices in running.values()]
    movement = least_movement(nodes, present, layout)
    names = list(running)
    kept = [names[index] for index in movement.kept]
    return Placement(tuple(kept), _devices_of(movement.new, nodes, running, kept, avoid))


def _devices_of(
    new: Sequence[tuple[str, int]],
    nodes: Mapping[str, int],
    running: Mapping[str, Sequence[Device]],
    kept: list[str],
    avoid: Set[Device],
) -> tuple[tuple[Device, ...], ...]:
    """Devices that nobody uses first, then those of the same surplus instance together."""
    taken = {device for name in kept for device in running[name]}
    order = {device: i for i, devices in enumerate(running.values()) for device in devices}
    chosen = []
    for node, degree in new:
        devices = [(node, device) for device in range(nodes[node]) if (node, device) not in taken]
        devices.sort(key=lambda device: (device in avoid, order.get(device, -1), device))
        chosen.append(tuple(sorted(devices[:degree])))
        taken.update(devices[:degree])
    return tuple(chosen)


class Transition:
    """The way to the layout that was wanted last; none is under way before the first one is."""

    def __init__(self, cluster: Cluster, place: Place = place) -> None:
        self._cluster, self._place = cluster, place
        self.active = False

    def refusal(self, layout: Sequence[int]) -> RequestError | None:
        """Why this layout cannot be had on the nodes that there are; None where it can."""
        nodes = self._cluster.nodes
        wanted = ", ".join(map(str, layout))
        if not layout or any(degree not in (1, 2, 4, 8) for degree in layout):
            return RequestError(f"the layout is [{wanted}]; wanted TP degrees of 1, 2, 4 or 8", "layout")
        if len(self._place(layout, nodes, {}, frozenset()).new) < len(layout):
            have = ", ".join(f"{node}: {count}" for node, count in sorted(nodes.items())) or "none"
            return RequestError(
                f"the layout [{wanted}] does not fit the devices ({have}); an instance's are all on one node",
                "layout",
            )
        return None

    def want(self, layout: Sequence[int]) -> None:
        """From now on towards this layout, from wherever the cluster is."""
        cluster = self._cluster
        preferred = sorted(cluster.instances.values(), key=lambda each: (each.draining, not each.slot.wanted))
        running = {each.name: [id[:2] for id in each.ranks] for each in preferred}
        down = {device for device, rank in cluster.ranks.items() if rank.state == "down"}
        placement = self._place(layout, cluster.nodes, running, down)
        for slot in cluster.slots:
            slot.wanted, slot.devices = False, ()
        for name in placement.kept:
            cluster.instances[name].slot.wanted = True
            cluster.instances[name].draining = False
        for devices in placement.new:
            cluster.add_slot(len(devices), devices)
        unplaced = list(layout)
        for degree in cluster.layout:
            unplaced.remove(degree)
        for degree in unplaced:
            cluster.add_slot(degree)
        self.active = True

    def to_drain(self) -> list[Instance]:
        """Instances to be marked as draining now; ends the transition where nothing is left to do."""
        cluster = self._cluster
        surplus = [each for each in cluster.instances.values() if not each.slot.wanted]
        bound = [slot for slot in cluster.slots if slot.devices]
        forming = [each for each in cluster.instances.values() if each.slot.wanted and not each.serving]
        if forming or any(each.draining for each in surplus):
            return []  # one at a time
        blockers = [self._blockers(slot, surplus) for slot in bound]
        if any(self._can_form(slot) for slot, others in zip(bound, blockers, strict=True) if not others):
            return []
        if next_ones := min(filter(None, blockers), key=len, default=None):
            return next_ones if all(each.serving for each in next_ones) else []
        if not bound and not any(slot.wanted and not slot.instance for slot in cluster.slots):
            self.active = bool(surplus)
            return [each for each in surplus if each.serving]
        self.active = bool(bound or surplus)
        return []

    def _can_form(self, slot: Slot) -> bool:
        """As soon as its ranks have left what they were in."""
        ranks = [self._cluster.ranks.get(device) for device in slot.devices]
        return all(rank and rank.state != "down" for rank in ranks)

    def _blockers(self, slot: Slot, surplus: list[Instance]) -> list[Instance]:
        return [each for each in surplus if any(id[:2] in slot.devices for id in each.ranks)]
