"""The head's end of the wire for tests of agents and ranks: a plain ROUTER, driven by hand."""

import contextlib
from typing import TypeVar

import zmq

from dlmserve.messages import Heartbeat, Message, decode, encode

LIMIT_S = 60  # for anything that is waited for; only a broken test gets there
M = TypeVar("M", bound=Message)


class WireHead:
    """Answers the heartbeats of agents; whatever else arrives is kept until it is asked for."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.endpoint = f"ipc://{run_dir}/head"
        self.beats: set[str] = set()  # identities that sent a heartbeat
        self._kept: list[Message] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(self.endpoint)

    def send(self, identity: str, *messages: Message) -> None:
        for message in messages:
            self._socket.send_multipart([identity.encode(), encode(message)])

    def next(self, kind: type[M], **wanted: object) -> M:
        """The oldest message of this kind whose fields have these values; waits for it."""
        while True:
            for i, message in enumerate(self._kept):
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in wanted.items()):
                    return self._kept.pop(i)  # type: ignore[return-value]
            self._receive(f"{kind.__name__} with {wanted}")

    def wait_for_beat(self, identity: str) -> None:
        self.beats.discard(identity)
        while identity not in self.beats:
            self._receive(f"a heartbeat of {identity}")

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _receive(self, awaited: str) -> None:
        assert self._socket.poll(LIMIT_S * 1000), f"no {awaited} within {LIMIT_S} s; got {self._kept}"
        identity, data = self._socket.recv_multipart()
        message = decode(data, "head")
        if not isinstance(message, Heartbeat):
            self._kept.append(message)
            return
        self.beats.add(identity.decode())
        if message.device < 0:
            with contextlib.suppress(zmq.ZMQError):  # an agent that is gone by now
                self.send(identity.decode(), message)
