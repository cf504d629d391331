"""OpenAI's response objects, whole and in chunks, and the `dlm` extension of both.

Owns every key that a client sees. Knows nothing of sockets or of how pieces come about.

`dlm` of a response: {steps, recompute_steps, tokens_per_step, mean_threshold, threshold_cap, slo_ms,
latency_ms, slo_met, instances}. tokens_per_step counts unmasked tokens, also those past the answer's end;
threshold_cap is what load control allowed at the end, null without control. Over several decodings steps are
summed, the threshold is a mean over tokens, the cap the lowest, the latency the slowest's, and the SLO is
met where all met it; each choice then has a `dlm` of its own too.

`dlm` of a chunk (include_unmask): {step, block, threshold, unmasked: [{position, token_id, text,
confidence}], final_prefix}. position is a column of the canvas, final_prefix the number of answer tokens
without a mask before them. Where the client was slow, `unmasked` covers several steps and the rest
describes the last of them.
"""

import math
import time
from collections.abc import Sequence

from dlmserve.control.policy.request import Summary, Unmasked
from dlmserve.server.completion import Completion, Generation, Piece, Token
from dlmserve.server.schema import Request
from dlmserve.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's value for "very unlikely": JSON has no minus infinity


class Reply:
    """Renders one response. `reply_id` is its `id`, `model` the served name."""

    def __init__(
        self, request: Request, num_prompt_tokens: int, reply_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._chat = request.endpoint == "chat"
        self._tokenizer = tokenizer
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._opened: set[int] = set()  # choices of which a chunk exists

    def whole(self, generation: Generation) -> dict:
        """The response of a finished generation that was not streamed."""
        choices = []
        for completion in generation.completions:
            piece = completion.take() or Piece()
            choice = self._choice(piece)
            if len(generation.completions) > 1:
                choice["dlm"] = account([completion])
            choices.extend({"index": index, **choice} for index in completion.choices)
        return {
            "object": "chat.completion" if self._chat else "text_completion",
            **self._head,
            "choices": choices,
            **self._closing(generation),
        }

    def chunks(self, generation: Generation) -> list[dict]:
        """What is new since the last call; the response's last chunk also carries usage and the account."""
        chunks = [
            self._chunk(choice, piece)
            for completion in generation.completions
            if (piece := completion.take()) is not None
            for choice in completion.choices
        ]
        if chunks and generation.succeeded:
            if self._request.include_usage:  # as OpenAI: a chunk of its own, without choices
                chunks.append({**self._envelope(), "choices": []})
            closing = self._closing(generation)
            chunks[-1]["usage"] = closing["usage"]
            chunks[-1]["dlm"] = {**chunks[-1].get("dlm", {}), **closing["dlm"]}
        return chunks

    def _envelope(self) -> dict:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._request.include_usage else {}
        return {"object": kind, **self._head, **usage}

    def _choice(self, piece: Piece) -> dict:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        content = {"message": message} if self._chat else {"text": piece.text}
        return {**content, "logprobs": self._logprobs(piece.tokens), "finish_reason": piece.finish_reason}

    def _chunk(self, index: int, piece: Piece) -> dict:
        role = {} if index in self._opened else {"role": "assistant"}
        self._opened.add(index)
        content = {"delta": {**role, "content": piece.text}} if self._chat else {"text": piece.text}
        logprobs = self._logprobs(piece.tokens)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        chunk = {**self._envelope(), "choices": [choice]}
        if self._request.include_unmask and piece.update is not None:
            chunk["dlm"] = {
                "step": piece.update.step,
                "block": piece.update.did.block,
                "threshold": piece.update.did.threshold,
                "unmasked": [self._unmasked(unmasked) for unmasked in piece.unmasked],
                "final_prefix": piece.final_prefix,
            }
        return chunk

    def _unmasked(self, unmasked: Unmasked) -> dict:
        return {
            "position": unmasked.position,
            "token_id": unmasked.token,
            "text": self._tokenizer.token_text(unmasked.token),
            "confidence": unmasked.confidence,
        }

    def _closing(self, generation: Generation) -> dict:
        """`usage` (what was returned: a text shown in several choices counts in each) and `dlm`."""
        num_tokens = sum(c.num_tokens * len(c.choices) for c in generation.completions)
        usage = {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self._num_prompt_tokens + num_tokens,
        }
        return {"usage": usage, "dlm": account(generation.completions)}

    def _logprobs(self, tokens: list[Token]) -> dict | None:
        if self._request.logprobs is None:
            return None
        return self._chat_logprobs(tokens) if self._chat else self._text_logprobs(tokens)

    def _chat_logprobs(self, tokens: list[Token]) -> dict:
        content = [
            {
                **self._logprob(token.unmasked.token, _log(token.unmasked.confidence)),
                "top_logprobs": [self._logprob(other, value) for other, value in token.unmasked.top or []],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, value: float) -> dict:
        text, raw = self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)
        return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": raw}

    def _text_logprobs(self, tokens: list[Token]) -> dict:
        tops = None
        if self._request.logprobs:
            tops = [self._top_by_text(token.unmasked) for token in tokens]
        return {
            "text_offset": [token.start for token in tokens],
            "tokens": [self._tokenizer.token_text(token.unmasked.token) for token in tokens],
            "token_logprobs": [_log(token.unmasked.confidence) for token in tokens],
            "top_logprobs": tops,
        }

    def _top_by_text(self, unmasked: Unmasked) -> dict[str, float]:
        """The alternatives and, as OpenAI has it, the token itself."""
        pairs = [(unmasked.token, _log(unmasked.confidence)), *(unmasked.top or [])]
        return {
            self._tokenizer.token_text(token): max(value, LEAST_LOGPROB) for token, value in reversed(pairs)
        }


def _log(confidence: float) -> float:
    return max(math.log(confidence), LEAST_LOGPROB) if confidence > 0 else LEAST_LOGPROB


def account(completions: Sequence[Completion]) -> dict:
    """The `dlm` object of some finished decodings of one request."""
    summaries = [c.summary for c in completions if c.summary is not None]
    num_steps = sum(summary.steps for summary in summaries)
    slo_s = summaries[0].slo_s
    return {
        "steps": num_steps,
        "recompute_steps": sum(summary.recompute_steps for summary in summaries),
        "tokens_per_step": sum(summary.num_unmasked for summary in summaries) / num_steps
        if num_steps
        else 0.0,
        "mean_threshold": _mean_threshold(summaries),
        "threshold_cap": min(
            (s.threshold_cap for s in summaries if s.threshold_cap is not None), default=None
        ),
        "slo_ms": None if slo_s is None else slo_s * 1000,
        "latency_ms": max(summary.latency_s for summary in summaries) * 1000,
        "slo_met": None if slo_s is None else all(summary.slo_met for summary in summaries),
        "instances": list(dict.fromkeys(name for summary in summaries for name in summary.instances)),
    }


def _mean_threshold(summaries: Sequence[Summary]) -> float | None:
    pairs = [(s.mean_threshold, s.num_unmasked) for s in summaries if s.mean_threshold is not None]
    num_tokens = sum(num for _, num in pairs)
    return sum(mean * num for mean, num in pairs) / num_tokens if num_tokens else None
