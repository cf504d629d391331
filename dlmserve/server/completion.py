"""The server's end of one decoding: unmasked canvas columns in, merged pieces of the answer out.

Owns the answer's contiguous prefix, why it ended, and what the client was not yet given. Knows nothing of
JSON or sockets: `streaming.py` and `replies.py` take pieces from here, when their client is ready for one.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dlmserve.control.policy.request import (
    CancelOutcome,
    FinishReason,
    RequestSpec,
    Sink,
    StepUpdate,
    Summary,
    Unmasked,
)
from dlmserve.errors import DlmServeError
from dlmserve.server.specs import Run
from dlmserve.server.text import AnswerText
from dlmserve.tokenizer import Tokenizer


class Head(Protocol):
    """What the edge uses of control.loop.Head."""

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    def submit(self, spec: RequestSpec, sink: Sink) -> int: ...

    def cancel(self, request: int, outcome: CancelOutcome) -> Summary | None: ...

    @property
    def capacity(self) -> int: ...

    def cluster(self) -> dict: ...

    def want_layout(self, layout: list[int]) -> None: ...


@dataclass(frozen=True)
class Token:
    """A token of the answer; `start` is where it begins in the answer's text, in characters."""

    start: int
    unmasked: Unmasked


@dataclass
class Piece:
    """What happened to an answer since the last piece; several steps are one where the client is slow."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    unmasked: list[Unmasked] = field(default_factory=list)
    update: StepUpdate | None = None  # the last step so far
    final_prefix: int = 0  # tokens of the answer without a mask before them
    finish_reason: Literal["stop", "length"] | None = None


class Completion:
    """A Sink. `changed` is called whenever there is something to take."""

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        stops: Sequence[str],
        include_unmask: bool,
        changed: Callable[[], None],
    ) -> None:
        self.spec = run.spec
        self.choices = run.choices
        self.summary: Summary | None = None
        self.error: DlmServeError | None = None
        self._eos_ids = () if run.spec.decoding.ignore_eos else eos_ids
        self._include_unmask = include_unmask
        self._changed = changed
        self._text = AnswerText(tokenizer, stops)
        self._by_column: dict[int, Unmasked] = {}
        self._prefix: list[Unmasked] = []  # the answer's tokens, in order; ends before an EOS
        self._ended = False  # an EOS or the limit was met: nothing follows
        self._num_given = 0  # tokens of the prefix that are in pieces already taken
        self._pending = Piece()
        self._update: StepUpdate | None = None
        self._head: Head | None = None
        self._number = -1

    def start(self, head: Head) -> None:
        """Raises QueueFull, Unavailable."""
        self._number = head.submit(self.spec, self)
        self._head = head

    def abandon(self) -> None:
        """The client left, or another choice failed. Nothing to do where the decoding is over."""
        if self._head is not None and not self.done:
            self._head.cancel(self._number, "abandoned")

    @property
    def done(self) -> bool:
        return self.summary is not None or self.error is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of the text that was released so far."""
        return self._text.num_tokens

    def on_step(self, update: StepUpdate) -> None:
        unmasked = update.unmasked
        self._by_column.update((each.position, each) for each in unmasked)
        self._advance()
        self._update = update
        if self._include_unmask:
            self._pending.unmasked.extend(unmasked)
        if self._text.stopped and self._head is not None:
            summary = self._head.cancel(self._number, "stop")
            if summary is not None:
                self.on_finish("stop", summary)
        self._changed()

    def on_finish(self, reason: FinishReason, summary: Summary) -> None:
        self.summary = summary
        self._pending.text += self._text.finish()
        self._pending.finish_reason = "stop" if self._text.stopped else reason
        self._changed()

    def on_error(self, error: DlmServeError) -> None:
        self.error = error
        self._changed()

    def take(self) -> Piece | None:
        """Everything since the last call as one piece; None where the client would see nothing new."""
        piece = self._pending
        if not (piece.text or piece.finish_reason or piece.unmasked):
            return None
        starts, end = self._text.starts, self._text.num_tokens
        piece.tokens = [Token(starts[i], self._prefix[i]) for i in range(self._num_given, end)]
        piece.update, piece.final_prefix = self._update, len(self._prefix)
        self._num_given = end
        self._pending = Piece()
        return piece

    def _advance(self) -> None:
        """Moves over the columns that became contiguous, up to an EOS, the limit or a stop string."""
        while not self._ended and not self._text.stopped:
            unmasked = self._by_column.pop(self.spec.output_start + len(self._prefix), None)
            if unmasked is None:
                return
            if unmasked.token in self._eos_ids:
                self._ended = True
                return
            self._prefix.append(unmasked)
            self._pending.text += self._text.push(unmasked.token)
            self._ended = self.spec.output_start + len(self._prefix) == self.spec.limit


class Generation:
    """All decodings of one HTTP request: submitted together, cancelled together when the block is left.

    Raises QueueFull, Unavailable on entry, with nothing left running.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._event = asyncio.Event()
        self.completions: list[Completion] = []

    def add(
        self, run: Run, tokenizer: Tokenizer, eos_ids: Collection[int], stops: Sequence[str], unmask: bool
    ) -> None:
        self.completions.append(Completion(run, tokenizer, eos_ids, stops, unmask, self._event.set))

    def __enter__(self) -> "Generation":
        try:
            for completion in self.completions:
                completion.start(self._head)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._abandon()

    @property
    def done(self) -> bool:
        return all(completion.done for completion in self.completions)

    @property
    def succeeded(self) -> bool:
        return all(completion.summary is not None for completion in self.completions)

    async def changed(self) -> None:
        """Returns when there may be something new to take."""
        await self._event.wait()
        self._event.clear()

    async def finished(self) -> None:
        """Returns when all is decoded. Raises the first error of any choice."""
        while not self.done:
            self.raise_error()
            await self.changed()
        self.raise_error()

    def raise_error(self) -> None:
        for completion in self.completions:
            if completion.error is not None:
                raise completion.error

    def _abandon(self) -> None:
        for completion in self.completions:
            completion.abandon()
