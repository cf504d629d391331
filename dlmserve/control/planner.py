"""The planner, as the head sees it: a child process that is asked and answers, started again when it ends.

Owns the process and the pipes to it. Knows nothing of plans: `planning/process.py` is at the other end. Never
blocks the loop.
"""

import asyncio
import contextlib
import logging
import struct
import sys
from collections.abc import Callable

import msgspec

from dlmserve.control.policy.events import Planned
from dlmserve.control.policy.plan import Plan, Problem, tp_layout

ANSWER_S = 90.0  # longer than the planner's own limits together
RETRY_S = 1.0  # before it is started again; doubles up to
MAX_RETRY_S = 60.0
LENGTH = struct.Struct("<I")
COMMAND = (sys.executable, "-m", "dlmserve.control.planning.process")

log = logging.getLogger("dlmserve.planner")


class PlannerProcess:
    """`answer` is called on the loop that called `start`, once for each plan that was made."""

    def __init__(self, answer: Callable[[Planned], object], command: tuple[str, ...] = COMMAND) -> None:
        self._answer, self._command = answer, command
        self._problem: Problem | None = None  # the newest that is not asked yet
        self._asked = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._num_failures = 0  # in a row
        self.pid: int | None = None  # of the process that runs

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_forever())

    def ask(self, problem: Problem) -> None:
        """Takes the place of one that has not been asked yet: only the newest load counts."""
        self._problem = problem
        self._asked.set()

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run_forever(self) -> None:
        while True:
            try:
                await self._run_once()
            except Exception as error:
                log.warning("the planner failed: %s", error or type(error).__name__)
            wait_s = min(MAX_RETRY_S, RETRY_S * 2**self._num_failures)
            self._num_failures += 1
            log.warning("the planner ended; starting it again in %.0f s", wait_s)
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> None:
        """One life of the process."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C must reach the head only.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        self.pid = process.pid
        both = [asyncio.create_task(process.wait()), asyncio.create_task(self._ask_forever(process))]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.pid = None
            for task in both:
                task.cancel()
            if process.returncode is None:
                process.kill()
            await asyncio.gather(*both, process.wait(), return_exceptions=True)

    async def _ask_forever(self, process: asyncio.subprocess.Process) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            assert self._problem and process.stdin and process.stdout
            data = msgspec.msgpack.encode(self._problem)
            process.stdin.write(LENGTH.pack(len(data)) + data)
            answer = await asyncio.wait_for(_read_frame(process.stdout), ANSWER_S)
            self._num_failures = 0
            if answer:
                plan = msgspec.msgpack.decode(answer, type=Plan)
                layout = ",".join(map(str, tp_layout(plan.layout)))
                status = f"{plan.status} ({plan.reason})" if plan.reason else plan.status
                log.info("plan: layout %s, %s, in %.1f s", layout, status, plan.solve_s)
                self._answer(Planned(plan))


async def _read_frame(stream: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError where the process ends instead."""
    (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    return await stream.readexactly(length)
