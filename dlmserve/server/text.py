"""Text of a growing answer: what may be sent of it, where it stops. Append-only.

Owns stop strings and where each token lies in the text. Knows nothing of requests, steps or HTTP.

What is sent does not depend on how the tokens arrive: of several stop strings the one that is complete first
ends the text (the longest where two are complete at the same character).
"""

from collections.abc import Sequence

from dlmserve.tokenizer import Detokenizer, Tokenizer


class StopMatcher:
    """Lets text pass up to the first stop string; holds back only what could begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What became certain. Empty once stopped."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """A stop string that only began is text after all."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class AnswerText:
    """Tokens in, text out. `starts[i]` is where token i begins in the text, in characters."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._num_seen = 0
        self.starts: list[int] = []
        self.num_released = 0
        self._finished = False

    @property
    def stopped(self) -> bool:
        return self._matcher.stopped

    @property
    def num_tokens(self) -> int:
        """Tokens of the released text: those that begin before its end; of a whole answer all."""
        if self._finished and not self.stopped:
            return len(self.starts)
        num = len(self.starts)
        while num and self.starts[num - 1] >= self.num_released:
            num -= 1
        return num

    def push(self, token: int) -> str:
        """Text that may be sent now. After a stop string: nothing."""
        if self.stopped:
            return ""
        self.starts.append(self._num_seen)
        return self._release(self._detokenizer.push([token]))

    def finish(self) -> str:
        """What was held back; no token follows."""
        if self._finished:
            return ""
        text = self._release(self._detokenizer.flush())
        rest = self._matcher.flush()
        self.num_released += len(rest)
        self._finished = True
        return text + rest

    def _release(self, text: str) -> str:
        self._num_seen += len(text)
        released = self._matcher.push(text)
        self.num_released += len(released)
        return released
