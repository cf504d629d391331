"""The head's links to agents and ranks: receives what they say, sends what they are told, sends strangers away.

Owns the sockets (one for this machine, one for other nodes), who has said hello, and the protocol's version
check. Knows nothing of what the messages lead to.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from dlmserve.control.wire import LOCAL_NODE
from dlmserve.errors import ConfigError, ProtocolError, WorkerError
from dlmserve.keys import Keys
from dlmserve.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    Heartbeat,
    Introduce,
    Message,
    NodeLeft,
    RankHello,
    Shutdown,
    ToHead,
)
from dlmserve.transport import Router

REFUSALS_EVERY_S = 60.0

log = logging.getLogger("dlmserve.head")


class Links:
    """`hear` is called on the loop with each message of a peer that has said hello to this head.

    All others are asked to do so first: what they say may be meant for a head that ran here before.
    """

    def __init__(
        self, local: str, remote: str | None, keys: Keys | None, hear: Callable[[ToHead], None]
    ) -> None:
        """Binds at once; `keys` are for the remote address. Raises ConfigError."""
        self._hear = hear
        self._known: set[str] = set()
        self._pids: dict[str, int] = {}  # of the nodes' agents
        self._local = Router(local)
        self._remote: Router | None = None
        if remote:
            try:
                self._remote = Router(remote, keys)
            except ConfigError:
                self._local.close()
                raise
            log.info(
                "nodes may join at %s, %s", remote, "with keys" if keys else "from this machine, without keys"
            )
        self._tasks = [asyncio.create_task(self._receive_forever(self._local))]
        if self._remote:
            self._tasks.append(asyncio.create_task(self._receive_forever(self._remote)))
            self._tasks.append(asyncio.create_task(_log_refusals(self._remote)))

    async def _receive_forever(self, router: Router) -> None:
        while True:
            try:
                identity, message = await router.receive()
                if (_node(identity) == LOCAL_NODE) != (router is self._local):
                    log.warning("%s has no such name here: ignored", identity)
                elif self._is_known(identity, message):
                    self._hear(message)
            except ProtocolError as error:
                log.warning("message dropped: %s", error)
            except Exception:
                log.exception("a message could not be handled; going on")
            await asyncio.sleep(0)  # a message that is already there does not suspend: let others run

    def _is_known(self, identity: str, message: ToHead) -> bool:
        peer = identity.removesuffix(":hb")
        match message:
            case RankHello() | AgentHello():
                return self._greet(identity, message)
            case _ if peer not in self._known:
                self._try_to_send(peer, Introduce())
                return False
            case Heartbeat(_, -1):
                self.send(peer, message)
        return True

    def _greet(self, identity: str, hello: RankHello | AgentHello) -> bool:
        if hello.version != PROTOCOL_VERSION:
            reason = f"it speaks protocol {hello.version}, not {PROTOCOL_VERSION}"
            log.error("%s is sent away: %s", identity, reason)
            self.send(identity, Shutdown(reason))
            return False
        if isinstance(hello, AgentHello):
            if self._pids.get(hello.node, hello.pid) != hello.pid:
                self._hear(NodeLeft(hello.node, "another agent has taken its place"))
            self._pids[hello.node] = hello.pid
        self._known.add(identity)
        return True

    def forget(self, node: str) -> None:
        """The node is lost: if it comes back, it joins anew."""
        self._pids.pop(node, None)
        self._known = {identity for identity in self._known if _node(identity) != node}

    def send(self, identity: str, message: Message) -> bool:
        """Whether it is on its way; never blocks."""
        error = self._try_to_send(identity, message)
        if error:
            log.warning("%s", error)
        return error is None

    def _try_to_send(self, identity: str, message: Message) -> WorkerError | None:
        router = self._local if _node(identity) == LOCAL_NODE else self._remote
        try:
            if router is None:
                raise WorkerError(f"{identity} cannot be reached: this head listens to no other node")
            router.send(identity, message)
        except WorkerError as error:
            return error
        return None

    async def stop_receiving(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def close(self) -> None:
        self._local.close()
        if self._remote:
            self._remote.close()


async def _log_refusals(router: Router) -> None:
    """Whoever is refused tries again and again: each reason is told once a minute."""
    told_at: dict[str, float] = {}
    while True:
        reason = await router.refusal()
        now = asyncio.get_running_loop().time()
        if now - told_at.get(reason, -math.inf) > REFUSALS_EVERY_S:
            told_at[reason] = now
            log.warning("a peer was refused: %s", reason)


def _node(identity: str) -> str:
    return identity.partition(":")[0]
