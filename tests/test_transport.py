"""Real ipc sockets: what the head, the peers and the ranks of an instance can count on."""

import asyncio
import gc
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from dlmserve import keys
from dlmserve.errors import ConfigError, ProtocolError, WorkerError
from dlmserve.messages import Cancel, Heartbeat, Leave, Release, RunStep, encode
from dlmserve.transport import Dealer, PlanReceiver, PlanSender, Router, check_endpoint

LIMIT_S = 30  # only a broken test gets there
T = TypeVar("T")


def run(story: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(story, LIMIT_S))


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/head.sock"


def test_head_and_peer_hear_each_other(endpoint: str) -> None:
    async def story() -> None:
        router, peer = Router(endpoint), Dealer(endpoint, "n:0:1")
        peer.send(Heartbeat("n", 0, 1))
        assert await router.receive() == ("n:0:1", Heartbeat("n", 0, 1))
        router.send("n:0:1", Cancel(7))
        assert peer.receive() == Cancel(7)
        peer.close()
        router.close()

    run(story())


def test_a_router_that_nobody_closed_is_closed_when_it_is_collected(tmp_path: Path) -> None:
    head_keys, _ = (str(path) for path in keys.generate(str(tmp_path / "keys")))

    async def story() -> None:
        router = Router("tcp://127.0.0.1:*", keys.read(head_keys, "head"))
        socket, others = router._socket, threading.active_count() - 1
        del router
        gc.collect()
        assert socket.closed
        assert threading.active_count() == others, "the thread that checks keys goes on"

    run(story())


def test_a_peer_drains_all_that_waits_in_order(endpoint: str) -> None:
    async def story() -> None:
        router, peer = Router(endpoint), Dealer(endpoint, "n:0:1")
        peer.send(Heartbeat("n", 0, 1))
        await router.receive()
        for request in range(3):
            router.send("n:0:1", Cancel(request))
        heard = []
        while len(heard) < 3 and peer.poll(LIMIT_S):
            heard += peer.drain()
        assert heard == [Cancel(0), Cancel(1), Cancel(2)]
        assert peer.drain() == [] and not peer.poll(0)
        peer.close()
        router.close()

    run(story())


def test_sending_to_nobody_says_so(endpoint: str) -> None:
    async def story() -> None:
        router = Router(endpoint)
        with pytest.raises(WorkerError, match="Cancel did not reach n:3:1"):
            router.send("n:3:1", Cancel(7))
        router.close()

    run(story())


def test_a_peer_that_stopped_reading_does_not_block_the_head(endpoint: str) -> None:
    async def story() -> None:
        router, peer = Router(endpoint), Dealer(endpoint, "n:0:1")
        peer.send(Heartbeat("n", 0, 1))
        await router.receive()
        with pytest.raises(WorkerError, match="did not reach"):
            for request in range(1_000_000):
                router.send("n:0:1", Cancel(request))
        peer.close()
        router.close()

    run(story())


def test_a_restarted_peer_takes_its_identity_over(endpoint: str) -> None:
    async def story() -> None:
        router = Router(endpoint)
        for life in range(20):
            peer = Dealer(endpoint, "n:agent")
            peer.send(Heartbeat("n", -1, life))
            assert (await router.receive())[1] == Heartbeat("n", -1, life)
            router.send("n:agent", Cancel(life))
            assert peer.receive() == Cancel(life)
            peer.close()
        router.close()

    run(story())


def test_messages_keep_coming_while_the_head_sends(endpoint: str) -> None:
    """A send may swallow the edge that announces a message: the next receive must find it all the same."""

    async def story() -> None:
        router, peer = Router(endpoint), Dealer(endpoint, "n:0:1")
        peer.send(Heartbeat("n", 0, 0))
        await router.receive()
        for round_number in range(1, 200):
            receiving = asyncio.ensure_future(router.receive())
            await asyncio.sleep(0)
            peer.send(Heartbeat("n", 0, round_number))
            router.send("n:0:1", Cancel(round_number))
            assert (await receiving)[1] == Heartbeat("n", 0, round_number)
            assert peer.receive() == Cancel(round_number)
        peer.close()
        router.close()

    run(story())


def test_bytes_that_are_no_message_are_refused_and_the_next_one_is_heard(endpoint: str) -> None:
    async def story() -> None:
        router, peer = Router(endpoint), Dealer(endpoint, "n:0:1")
        peer.socket.send(b"GET / HTTP/1.1")
        peer.socket.send_multipart([b"", encode(Cancel(1))])  # not for a head
        peer.send(Heartbeat("n", 0, 1))
        for _ in range(2):
            with pytest.raises(ProtocolError, match="no message for a head"):
                await router.receive()
        assert (await router.receive())[1] == Heartbeat("n", 0, 1)
        peer.close()
        router.close()

    run(story())


def test_an_address_in_use_is_an_error_that_names_it() -> None:
    async def story() -> None:
        holder = zmq.Context.instance().socket(zmq.ROUTER)
        port = holder.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
            Router(f"tcp://127.0.0.1:{port}")
        holder.close(linger=0)

    run(story())


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:5570", "tcp://*:5570", "tcp://10.0.0.1:5570", "tcp://[::]:1"]
)
def test_an_open_port_without_keys_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="CURVE keys"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("endpoint", ["udp://127.0.0.1:1", "/tmp/socket", "tcp:///x", "ipc://" + "x" * 108])
def test_a_wrong_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5570", "tcp://[::1]:5570", "tcp://localhost:1", "ipc:///x"]
)
def test_local_addresses_are_accepted(endpoint: str) -> None:
    check_endpoint(endpoint)


def test_every_follower_hears_every_plan_in_order(tmp_path: Path) -> None:
    followers = [PlanReceiver(f"ipc://{tmp_path}/plan{rank}.sock") for rank in (1, 2)]
    leader = PlanSender("i0.1", [follower.endpoint for follower in followers])
    plans = [RunStep([Cancel(1), Release(2)]), RunStep([]), Leave()]
    for plan in plans:
        leader.send(plan, LIMIT_S)
    for follower in followers:
        follower.formation = "i0.1"
        assert [follower.receive(LIMIT_S) for _ in plans] == plans
        assert follower.receive(0) is None
        follower.close()
    leader.close()


def test_a_follower_ignores_the_plans_of_a_formation_that_is_over(tmp_path: Path) -> None:
    follower = PlanReceiver(f"ipc://{tmp_path}/plan.sock")
    old, new = PlanSender("i0.1", [follower.endpoint]), PlanSender("i0.2", [follower.endpoint])
    follower.formation = "i0.2"
    old.send(Leave(), LIMIT_S)
    new.send(RunStep([]), LIMIT_S)
    old.send(Leave(), LIMIT_S)
    new.send(Leave(), LIMIT_S)
    assert [follower.receive(LIMIT_S), follower.receive(LIMIT_S)] == [RunStep([]), Leave()]
    for end in (old, new, follower):
        end.close()


def test_a_leaders_last_word_arrives_though_it_closes_at_once(tmp_path: Path) -> None:
    follower = PlanReceiver(f"ipc://{tmp_path}/plan.sock")
    follower.formation = "i0.1"
    leader = PlanSender("i0.1", [follower.endpoint])
    leader.send(Leave(), LIMIT_S)
    leader.close()
    assert follower.receive(LIMIT_S) == Leave()
    follower.close()


def test_a_follower_that_is_not_there_is_noticed(tmp_path: Path) -> None:
    leader = PlanSender("i0.1", [f"ipc://{tmp_path}/nobody.sock"])
    with pytest.raises(WorkerError, match="rank 1 of i0.1 took no plan"):
        for _ in range(1_000_000):
            leader.send(RunStep([]), timeout_s=0)
    leader.close()
