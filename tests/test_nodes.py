"""Nodes that join over TCP: with the right keys, cut off and back again, and over to another head.

What a rank computes is fake here (fake_node.py); the sockets, the keys and the processes are real.
"""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dlmserve import keys
from dlmserve.control import loop
from dlmserve.control.loop import Head
from dlmserve.errors import ConfigError
from dlmserve.messages import PROTOCOL_VERSION, AgentHello, Heartbeat, Shutdown
from dlmserve.transport import Dealer, Router
from tests.test_head import LIMIT_S, Client, make_head, spec

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "TICK_S", 0.02)


@pytest.fixture
def key_files(tmp_path: Path) -> list[str]:
    return [str(path) for path in keys.generate(str(tmp_path / "keys"))]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Node:
    """A process of fake_node.py."""

    def __init__(
        self, head: str, name: str, devices: int = 1, key: str = "", enter: tuple[str, ...] = ()
    ) -> None:
        flags = ["--head", head, "--node", name, "--devices", str(devices), "--keys", key]
        command = [*enter, sys.executable, "-m", "tests.fake_node", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def node_names(head: Head) -> list[str]:
    return [node["node"] for node in head.cluster()["nodes"]]


def served_by(head: Head) -> list[str]:
    return sorted(each["node"] for each in head.cluster()["instances"] if each["state"] == "serving")


def tell(story: Callable[[], Awaitable[None]]) -> None:
    async def told() -> None:
        await asyncio.wait_for(story(), LIMIT_S)

    asyncio.run(told())


@contextlib.contextmanager
def running(*nodes: Node) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            node.end()


def make_lone_head(run_dir: Path, endpoint: str, key: str | None, **settings) -> Head:
    return make_head(run_dir, devices=0, listen=endpoint, keys=key, **settings)


@contextlib.asynccontextmanager
async def listening(run_dir: Path, endpoint: str, key: str | None, **settings) -> AsyncIterator[Head]:
    """A head without a node of its own; stopped in the end."""
    head = make_lone_head(run_dir, endpoint, key, **settings)
    await head.start()
    try:
        yield head
    finally:
        await head.stop()


# ---- who gets in


def test_only_who_has_the_nodes_key_gets_in_and_the_others_are_told_apart(tmp_path, key_files) -> None:
    head_keys, node_keys = keys.read(key_files[0], "head"), keys.read(key_files[1], "node")
    [_, other_file] = keys.generate(str(tmp_path / "other"))
    wrong = keys.read(str(other_file), "node")
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def story() -> None:
        router = Router(endpoint, head_keys)
        stranger = Dealer(
            endpoint, "stranger:agent", node_keys._replace(public=wrong.public, secret=wrong.secret)
        )
        stranger.send(Heartbeat("stranger", -1, 0))
        assert "not the nodes' key" in await router.refusal()
        stranger.close()
        nobody = Dealer(endpoint, "nobody:agent")
        nobody.send(Heartbeat("nobody", -1, 0))
        assert await router.refusal()
        nobody.close()
        friend = Dealer(endpoint, "friend:agent", node_keys)
        friend.send(Heartbeat("friend", -1, 0))
        assert await router.receive() == ("friend:agent", Heartbeat("friend", -1, 0))  # and nothing before it
        router.send("friend:agent", Shutdown())
        assert friend.receive() == Shutdown()
        friend.close()
        router.close()

    tell(story)


def test_beyond_loopback_nothing_is_bound_without_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dlmserve keygen"):
        asyncio.run(make_lone_head(tmp_path, "tcp://0.0.0.0:5570", None).start())


def test_a_node_cannot_pass_for_the_heads_own_and_must_speak_its_protocol(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def story() -> None:
        async with listening(tmp_path, endpoint, None) as head:
            liar, old, fine = (Dealer(endpoint, f"{name}:agent") for name in ("local", "old", "fine"))
            liar.send(AgentHello(PROTOCOL_VERSION, "local", 1, 1))
            old.send(AgentHello(PROTOCOL_VERSION - 1, "old", 1, 2))
            fine.send(AgentHello(PROTOCOL_VERSION, "fine", 1, 3))
            await until(lambda: node_names(head))
            assert node_names(head) == ["fine"]
            await until(lambda: old.poll(0))
            assert "protocol" in str(old.receive())
            for dealer in (liar, old, fine):
                dealer.close()

    tell(story)


# ---- life and death


def test_a_node_that_stands_still_is_taken_out_and_joins_anew_when_it_goes_on(tmp_path, key_files) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def story() -> None:
        async with listening(
            tmp_path, endpoint, key_files[0], tp_layout=(1, 1), heartbeat_timeout_s=1.0
        ) as head:
            nodes = [Node(endpoint, name, key=key_files[1]) for name in ("a", "b")]
            with running(*nodes):
                await until(lambda: served_by(head) == ["a", "b"])
                stopped = []

                def stop_once(position: int) -> None:
                    if position == 40 and not stopped:
                        stopped.append(1)
                        nodes[0].signal(signal.SIGSTOP)

                clients = [Client(stop_once), Client(stop_once)]
                for client in clients:
                    head.submit(spec(120), client)
                summaries = [(await client.end)[1] for client in clients]
                assert all(sorted(client.tokens) == list(range(4, 124)) for client in clients)
                assert max(len(summary.instances) for summary in summaries) == 2, (
                    "none was on the node that stood still"
                )
                await until(lambda: node_names(head) == ["b"])
                nodes[0].signal(signal.SIGCONT)
                await until(lambda: served_by(head) == ["a", "b"])
                nodes[1].signal(signal.SIGTERM)
                await until(lambda: served_by(head) == ["a"])
                assert nodes[1].process.wait(LIMIT_S) == 0

    tell(story)


def test_another_head_on_the_same_address_takes_the_nodes_over(tmp_path, key_files) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def one_head(number: int) -> None:
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        async with listening(run_dir, endpoint, key_files[0]) as head:
            await until(lambda: served_by(head) == ["a"])
            client = Client()
            head.submit(spec(40), client)
            await client.end
            assert client.tokens == list(range(4, 44))  # nothing of what the first head asked for
            if number == 1:
                head.submit(spec(900), Client())  # the node works on it when this head is gone

    async def story() -> None:
        node = Node(endpoint, "a", key=key_files[1])
        with running(node):
            await one_head(1)
            await one_head(2)
            assert node.process.poll() is None

    tell(story)


# ---- a network of their own


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Two hosts with a link each to this one: name -> address of this end. Needs root and network namespaces."""
    made: list[str] = []
    try:
        links = {}
        for number, name in enumerate(("dlms-a", "dlms-b"), 1):
            ends = (f"veth-{name}", f"peer-{name}")
            for command in (
                f"ip netns add {name}",
                f"ip link add {ends[0]} type veth peer name {ends[1]} netns {name}",
                f"ip addr add 10.213.{number}.1/24 dev {ends[0]}",
                f"ip link set {ends[0]} up",
                f"ip -n {name} addr add 10.213.{number}.2/24 dev {ends[1]}",
                f"ip -n {name} link set {ends[1]} up",
            ):
                done = subprocess.run(command.split(), capture_output=True, text=True)
                if done.returncode:
                    pytest.skip(f"no network namespaces here: {command}: {done.stderr.strip()}")
                if "netns add" in command:
                    made.append(name)
            links[name] = f"10.213.{number}.1"
        yield links
    except FileNotFoundError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def test_a_link_that_is_cut_costs_no_request_and_heals(tmp_path, key_files, namespaces) -> None:
    port = free_port()

    def set_link(name: str, state: str) -> None:
        subprocess.run(["ip", "link", "set", f"veth-{name}", state], check=True)

    async def story() -> None:
        endpoint = f"tcp://0.0.0.0:{port}"
        async with listening(
            tmp_path, endpoint, key_files[0], tp_layout=(1, 1), heartbeat_timeout_s=1.0
        ) as head:
            nodes = [
                Node(f"tcp://{address}:{port}", name, key=key_files[1], enter=("ip", "netns", "exec", name))
                for name, address in namespaces.items()
            ]
            with running(*nodes):
                await until(lambda: served_by(head) == ["dlms-a", "dlms-b"])
                clients = [Client(), Client()]
                for client in clients:
                    head.submit(spec(120), client)
                await until(lambda: all(client.tokens for client in clients))
                set_link("dlms-a", "down")
                for client in clients:
                    await client.end
                    assert sorted(client.tokens) == list(range(4, 124))
                await until(lambda: node_names(head) == ["dlms-b"])
                set_link("dlms-a", "up")
                subprocess.run(["ip", "addr", "replace", "10.213.1.1/24", "dev", "veth-dlms-a"], check=True)
                await until(lambda: served_by(head) == ["dlms-a", "dlms-b"])

    tell(story)
