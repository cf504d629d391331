"""Who counts as silent, and when."""

from dlmserve.control.liveness import Liveness
from dlmserve.control.policy.cluster import RankId
from dlmserve.messages import Heartbeat

RANK = RankId("n", 0, 1)


def test_a_peer_is_silent_when_its_last_heartbeat_is_too_old() -> None:
    liveness = Liveness(timeout_s=10.0)
    liveness.note(Heartbeat("n", 0, 1), now=5.0)
    assert liveness.silent([RANK], now=15.0) == []
    assert liveness.silent([RANK], now=15.5) == [(RANK, 10.5)]
    liveness.note(Heartbeat("n", 0, 1), now=16.0)
    assert liveness.silent([RANK], now=17.0) == []


def test_a_peer_is_given_time_for_its_first_heartbeat() -> None:
    liveness = Liveness(timeout_s=10.0)
    assert liveness.silent([RANK, "n"], now=100.0) == []
    assert liveness.silent([RANK, "n"], now=111.0) == [(RANK, 11.0), ("n", 11.0)]


def test_an_older_process_does_not_speak_for_the_present_one() -> None:
    liveness = Liveness(timeout_s=10.0)
    assert liveness.silent([RANK], now=0.0) == []
    liveness.note(Heartbeat("n", 0, 0), now=10.5)
    assert liveness.silent([RANK], now=11.0) == [(RANK, 11.0)]


def test_a_listener_that_stood_still_blames_nobody() -> None:
    liveness = Liveness(timeout_s=10.0)
    liveness.note(Heartbeat("n", -1, 0), now=0.0)
    liveness.forgive(stalled_s=60.0)
    assert liveness.silent(["n"], now=65.0) == []
    assert liveness.silent(["n"], now=71.0) == [("n", 11.0)]


def test_whoever_is_no_longer_expected_is_forgotten() -> None:
    liveness = Liveness(timeout_s=10.0)
    liveness.note(Heartbeat("n", 0, 1), now=0.0)
    assert liveness.silent([], now=20.0) == []
    assert liveness.silent([RANK], now=21.0) == []
