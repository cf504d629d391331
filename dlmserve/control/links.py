"""The head's links to agents and ranks: receives what they say, sends what they are told, sends strangers away.

Owns the sockets and the protocol's version check. Knows nothing of what the messages lead to.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from dlmserve.control.wire import agent_identity
from dlmserve.errors import ProtocolError, WorkerError
from dlmserve.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    Heartbeat,
    Message,
    RankHello,
    Shutdown,
    ToHead,
)
from dlmserve.transport import Router

log = logging.getLogger("dlmserve.head")


class Links:
    """`hear` is called on the loop with each message that counts."""

    def __init__(self, endpoints: list[str], hear: Callable[[ToHead], None]) -> None:
        """Binds at once. Raises ConfigError."""
        self._hear = hear
        self._router = Router(endpoints)
        self._task = asyncio.create_task(self._receive_forever())

    async def _receive_forever(self) -> None:
        while True:
            try:
                identity, message = await self._router.receive()
                if self._is_wanted(identity, message):
                    self._hear(message)
            except ProtocolError as error:
                log.warning("message dropped: %s", error)
            except Exception:
                log.exception("a message could not be handled; going on")
            await asyncio.sleep(0)  # a message that is already there does not suspend: let others run

    def _is_wanted(self, identity: str, message: ToHead) -> bool:
        match message:
            case RankHello() | AgentHello() if message.version != PROTOCOL_VERSION:
                log.error(
                    "%s speaks protocol %d, not %d: sent away", identity, message.version, PROTOCOL_VERSION
                )
                self.send(identity, Shutdown())
                return False
            case Heartbeat(node, -1):
                self.send(agent_identity(node), message)
        return True

    def send(self, identity: str, message: Message) -> bool:
        """Whether it is on its way; never blocks."""
        try:
            self._router.send(identity, message)
        except WorkerError as error:
            log.warning("%s", error)
            return False
        return True

    async def stop_receiving(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def close(self) -> None:
        self._router.close()
