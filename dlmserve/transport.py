"""The ZeroMQ sockets: ROUTER (head), DEALER (agents, ranks), PUSH and PULL (leader to followers).

Owns socket options, framing, addresses and the keys' use. Knows nothing of what the messages mean. A socket
belongs to the thread that made it.

A peer's identity is `node:device:generation` (an agent's `node:agent`), given when it connects; a peer
that restarted under the same identity takes the old one's place.
"""

import asyncio
import hmac
import ipaddress
import weakref
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from dlmserve.errors import ConfigError, WorkerError
from dlmserve.keys import Keys
from dlmserve.messages import Message, ToFollower, ToHead, ToPeer, decode, encode

HIGH_WATER_MARK = 1000  # messages a socket holds for one peer
PLAN_LINGER_MS = 1000  # a leader's last word (Leave) is still sent after its socket is closed
MAX_IPC_PATH = 107  # sockaddr_un.sun_path, less its final zero
# Over TCP a peer may vanish without a word: a link that is silent for so long is closed and made anew.
LINK_PING_MS, LINK_TIMEOUT_MS = 2000, 6000
LINK_RETRY_MS, MAX_LINK_RETRY_MS = 200, 2000
AUTH_DOMAIN = "dlmserve"
REFUSALS = (
    zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


class Router:
    """The head's end of one address: one socket, all peers. Lives on the running asyncio loop.

    With keys only peers that have the node's secret key get in.
    """

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        """Raises ConfigError for an address that cannot be bound, or that must not be without keys."""
        check_endpoint(endpoint, has_keys=keys is not None)
        self._context = zmq.asyncio.Context()
        guard: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        _set_common(self._socket)
        if keys:
            # Without this CURVE takes any client; the callback counts only for the socket's own domain. A thread,
            # as pyzmq's asyncio one misses requests that come while it starts.
            guard = ThreadAuthenticator(zmq.Context(shadow=self._context))
            guard.start()
            guard.configure_curve_callback(AUTH_DOMAIN, _Doorkeeper(keys.peer))
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt_string(zmq.ZAP_DOMAIN, AUTH_DOMAIN)
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody at the door: nobody gets in
        self._monitor = self._socket.get_monitor_socket(REFUSALS)
        # Also when nobody calls it: a context that is collected together with its sockets waits for them for ever.
        self._close = weakref.finalize(self, _close, self._context, self._socket, self._monitor, guard)
        self._bind(endpoint)

    def _bind(self, endpoint: str) -> None:
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}; free it, or choose another address"
            ) from error

    def send(self, identity: str, message: Message) -> None:
        """Never blocks. Raises WorkerError where the peer is gone or has stopped reading."""
        frames = [identity.encode(), encode(message)]
        # With DONTWAIT the future is done on return. Not the plain socket below it: that would put the
        # asyncio reader to sleep, as any call may swallow the edge that announces a message.
        sent = self._socket.send_multipart(frames, flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future)
        error = sent.exception()
        if isinstance(error, zmq.ZMQError):
            raise WorkerError(f"{type(message).__name__} did not reach {identity}: {error.strerror}")
        if error is not None:
            raise error

    async def receive(self) -> tuple[str, ToHead]:
        """The next message and its sender. Raises ProtocolError for bytes that are none."""
        identity, *rest = await self._socket.recv_multipart()
        message = decode(rest[-1] if rest else b"", "head")
        return identity.decode(errors="replace"), message  # type: ignore[return-value]

    async def refusal(self) -> str:
        """Why the next peer that does not get in does not."""
        event: dict[str, Any] = parse_monitor_message(await self._monitor.recv_multipart())  # type: ignore[misc,assignment]
        return {
            zmq.Event.HANDSHAKE_FAILED_AUTH: "its key is not the nodes' key",
            zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it has no key, or not this head's public key",
        }.get(event["event"], "the handshake broke off")

    def close(self) -> None:
        self._close()


def _close(
    context: zmq.Context, socket: zmq.Socket, monitor: zmq.Socket, guard: ThreadAuthenticator | None
) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    if guard:
        guard.stop()
    socket.close(linger=0)
    context.term()


class _Doorkeeper:
    """Whether a client's public key is the nodes'. Its form is what pyzmq's authenticator calls."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._key)


class Dealer:
    """An agent's or a rank's end: one connection to the head, kept up by ZeroMQ itself."""

    def __init__(self, endpoint: str, identity: str, keys: Keys | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        _set_common(self.socket)
        if keys:
            self.socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.peer)
            self.socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            self.socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self.socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Blocks only while the head is a whole high-water mark behind."""
        self.socket.send(encode(message))

    def poll(self, timeout_s: float) -> bool:
        """Whether a message waits, after at most `timeout_s`."""
        return bool(self.socket.poll(timeout_s * 1000))

    def receive(self) -> ToPeer:
        """Blocks until there is one. Raises ProtocolError for bytes that are no message."""
        return decode(self.socket.recv(), "peer")  # type: ignore[return-value]

    def drain(self) -> list[ToPeer]:
        """All messages that wait; never blocks."""
        messages = []
        while self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]  (a third of poll's time)
            messages.append(self.receive())
        return messages

    def close(self, linger_s: float = 0.0) -> None:
        """What is unsent after `linger_s` is dropped."""
        self.socket.close(linger=int(linger_s * 1000))


class PlanSender:
    """The leader's end of an instance: the same message to every follower, in order.

    Each carries the formation's key, so that a follower never takes a plan of one that is over.
    """

    def __init__(self, formation: str, endpoints: list[str]) -> None:
        self._name = formation.encode()
        self._sockets = [zmq.Context.instance().socket(zmq.PUSH) for _ in endpoints]
        for socket, endpoint in zip(self._sockets, endpoints, strict=True):
            _set_common(socket)
            socket.connect(endpoint)

    def send(self, message: Message, timeout_s: float) -> None:
        """Raises WorkerError where a follower takes nothing for `timeout_s`."""
        if not self._sockets:
            return
        frames = [self._name, encode(message)]
        for rank, socket in enumerate(self._sockets, start=1):
            if not socket.poll(timeout_s * 1000, zmq.POLLOUT):
                raise WorkerError(f"rank {rank} of {self._name.decode()} took no plan for {timeout_s:g} s")
            socket.send_multipart(frames)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=PLAN_LINGER_MS)


class PlanReceiver:
    """A follower's end, bound once for the life of its process; hears one formation at a time."""

    def __init__(self, endpoint: str) -> None:
        check_endpoint(endpoint)
        self.formation = ""
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        _set_common(self.socket)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout_s: float) -> ToFollower | None:
        """The next message of `self.formation`; None where there is none within `timeout_s`."""
        while self.socket.poll(timeout_s * 1000):
            name, data = self.socket.recv_multipart()
            if name.decode() == self.formation:
                return decode(data, "follower")  # type: ignore[return-value]
        return None

    def close(self) -> None:
        self.socket.close(linger=0)


def check_endpoint(endpoint: str, has_keys: bool = False) -> None:
    """Raises ConfigError for what is neither ipc nor tcp, and for tcp beyond loopback without keys."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        path = endpoint.removeprefix("ipc://")
        if len(path.encode()) > MAX_IPC_PATH:
            raise ConfigError(
                f"socket path {path} has {len(path.encode())} bytes; at most {MAX_IPC_PATH}: "
                "choose a run directory with a shorter name"
            )
    elif parts.scheme != "tcp" or not parts.hostname:
        raise ConfigError(f"address {endpoint!r} is neither ipc://PATH nor tcp://ADDRESS:PORT")
    elif not has_keys and not _is_loopback(parts.hostname):
        raise ConfigError(
            f"{endpoint} is not on loopback and there are no CURVE keys: anyone who reaches it could take "
            "the server over; make keys with `dlmserve keygen` and give --keys"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _set_common(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HEARTBEAT_IVL, LINK_PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LINK_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, LINK_RETRY_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_LINK_RETRY_MS)
