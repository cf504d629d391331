"""Who counts as silent, and when."""

from dlmserve.control.liveness import HANG_FACTOR, Liveness, sender, step_limit_s
from dlmserve.control.policy.cluster import Instance, RankId, Slot
from dlmserve.messages import AgentHello, Heartbeat, RankExited, RankHello

LIMITS_S = {"a": 10.0}


def test_a_peer_is_silent_when_its_last_sign_of_life_is_too_old() -> None:
    liveness: Liveness[str] = Liveness()
    liveness.hear("a", now=5.0)
    assert liveness.silent(LIMITS_S, now=15.0) == []
    assert liveness.silent(LIMITS_S, now=15.5) == [("a", 10.5)]
    liveness.hear("a", now=16.0)
    assert liveness.silent(LIMITS_S, now=17.0) == []


def test_a_peer_is_given_time_for_its_first_word() -> None:
    liveness: Liveness[str] = Liveness()
    both = {"a": 10.0, "b": 12.0}
    assert liveness.silent(both, now=100.0) == []
    assert liveness.silent(both, now=111.0) == [("a", 11.0)]
    assert liveness.silent(both, now=113.0) == [("a", 13.0), ("b", 13.0)]


def test_a_listener_that_stood_still_blames_nobody() -> None:
    liveness: Liveness[str] = Liveness()
    liveness.hear("a", now=0.0)
    liveness.forgive(stalled_s=60.0)
    assert liveness.silent(LIMITS_S, now=65.0) == []
    assert liveness.silent(LIMITS_S, now=71.0) == [("a", 11.0)]


def test_whoever_is_no_longer_expected_is_forgotten() -> None:
    liveness: Liveness[str] = Liveness()
    liveness.hear("a", now=0.0)
    assert liveness.silent({}, now=20.0) == []
    assert liveness.silent(LIMITS_S, now=21.0) == []


def test_a_message_shows_which_process_runs() -> None:
    assert sender(Heartbeat("n", -1, 0)) == sender(AgentHello(1, "n", 2, 77)) == "n"
    hello = RankHello(1, "n", 0, 3, 77, "cpu", "plan")
    assert sender(Heartbeat("n", 0, 3)) == sender(hello) == RankId("n", 0, 3)
    assert sender(RankExited("n", 0, 3, "killed")) is None


def test_a_step_may_take_longer_where_much_is_resident_and_the_machine_is_slow() -> None:
    instance = Instance("i0.1", Slot(0, 1), (RankId("n", 0, 1),), max_num_seqs=8, token_s=0.1)
    assert step_limit_s(instance, at_least_s=30.0) == 30.0
    instance.reserve(1, num_pages=8, num_tokens=1000)
    assert step_limit_s(instance, at_least_s=30.0) == HANG_FACTOR * 100.0
