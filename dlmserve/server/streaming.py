"""Server-sent events: the pieces of a generation to one client, at that client's pace.

Owns the event format, the end of a stream and clients that stop reading. Knows nothing of what a chunk holds.

A slow reader delays nobody: while a write waits for its socket, the completions gather what happens.
"""

import asyncio
import logging

import msgspec
from aiohttp import web

from dlmserve.errors import DlmServeError
from dlmserve.server.completion import Generation
from dlmserve.server.failures import describe
from dlmserve.server.replies import Reply

log = logging.getLogger(__name__)

STALL_LIMIT_S = 60.0  # a reader that takes nothing for so long is given up
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx: pass events on as they come
    "X-Content-Type-Options": "nosniff",
}
DONE = b"data: [DONE]\n\n"


def event(data: dict) -> bytes:
    """JSON has no raw newlines, so no text of a model can end an event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def stream(request: web.Request, generation: Generation, reply: Reply) -> web.StreamResponse:
    """Streams until all choices ended. Raises what fails before the first event; later errors are events."""
    await generation.changed()
    generation.raise_error()
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    try:
        await _write_events(response, generation, reply)
        await response.write_eof()
    except ConnectionResetError:
        log.debug("the client left")
    except asyncio.TimeoutError:
        log.warning("a client took nothing for %.0f s", STALL_LIMIT_S)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _write_events(response: web.StreamResponse, generation: Generation, reply: Reply) -> None:
    try:
        while True:
            chunks, done = reply.chunks(generation), generation.done
            if chunks:
                await _write(response, b"".join(map(event, chunks)))
            generation.raise_error()
            if done:
                return await _write(response, DONE)
            await generation.changed()
    except DlmServeError as error:
        await _write(response, event(describe(error).body))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    await asyncio.wait_for(response.write(data), STALL_LIMIT_S)
