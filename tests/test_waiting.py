"""The waiting queue: its order, and who is late, whatever comes and goes in between."""

from hypothesis import given
from hypothesis import strategies as st

from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.waiting import WaitingQueue
from tests.story import MASK, make_spec


def make_request(number: int, slo_s: float | None, priority: int = 0, started: bool = False) -> RequestState:
    request = RequestState(number, make_spec(slo_s=slo_s, priority=priority), 0.0, MASK, num_pages=2)
    request.instances = ["i0.1"] if started else []
    return request


def test_who_had_started_comes_first_then_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for request in (
        make_request(1, None),
        make_request(2, None, priority=1),
        make_request(3, None),
        make_request(4, None, started=True),
    ):
        queue.add(request)
    assert queue.numbers() == [4, 2, 1, 3]
    assert [(entry.num_pages, entry.num_tokens) for entry in queue.entries()] == [(2, 8)] * 4


Happening = tuple[str, int, float, bool]  # what, request, SLO, started


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "look"]), st.integers(0, 9), st.floats(0.5, 30.0), st.booleans()
        ),
        max_size=40,
    )
)
def test_late_are_those_whose_deadline_passed_before_they_started(happenings: list[Happening]) -> None:
    queue, requests = WaitingQueue(), {}
    for now, (what, number, slo_s, started) in enumerate(happenings):
        if what == "add" and number not in requests:
            requests[number] = make_request(number, slo_s, started=started)
            queue.add(requests[number])
        elif what == "remove" and number in requests:
            queue.remove(requests.pop(number))
        wanted = [r.number for r in requests.values() if r.deadline < now and not r.started]
        late = queue.late(now, requests)
        assert sorted(request.number for request in late) == sorted(wanted)
        for request in late:  # as the scheduler does: they are given up
            queue.remove(requests.pop(request.number))
        queue.check()
