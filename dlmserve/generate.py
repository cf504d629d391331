"""`dlmserve generate`: one prompt through dlmserve.LLM, the canvas shown while it fills in.

Owns the picture. Knows nothing of how tokens are made.
"""

import argparse
import sys
import time
from collections.abc import Collection

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dlmserve.errors import RequestError
from dlmserve.llm import LLM, Completion, DecodingParams
from dlmserve.messages import RequestStep
from dlmserve.tokenizer import Tokenizer

MASK, END = "░", "·"  # END: an EOS, of which a finished answer has many


class CanvasView:
    """The output positions of one request: masks, settled tokens, and the latest step's highlighted."""

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: Collection[int], start: int, num_positions: int
    ) -> None:
        """`start`: canvas column of the first output position."""
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._columns = range(start, start + num_positions)
        self._texts: dict[int, str] = {}
        self._latest: list[int] = []
        self._num_steps = 0

    def apply(self, step: RequestStep) -> None:
        self._num_steps += 1
        self._latest = step.positions
        for position, token in zip(step.positions, step.tokens, strict=True):
            self._texts[position] = END if token in self._eos_ids else self._tokenizer.token_text(token)

    def render(self) -> Group:
        canvas = Text()
        for column in self._columns:
            style = "bold green" if column in self._latest else "" if column in self._texts else "dim"
            canvas.append(self._texts.get(column, MASK), style)
        num_unmasked = sum(column in self._texts for column in self._columns)
        figures = f"step {self._num_steps}, {num_unmasked} of {len(self._columns)} unmasked"
        return Group(canvas, Text(figures, "dim"))


def run_generate(args: argparse.Namespace) -> int:
    """Prints the answer on stdout, the figures on stderr. Raises DlmServeError."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    llm = LLM(
        args.model, device=args.device, dtype=args.dtype, cache=args.cache, load_format=args.load_format
    )
    try:
        started_at = time.monotonic()
        out = _decode(llm, _encode(llm, prompt, args.raw), _params(args))
        duration_s = time.monotonic() - started_at
    finally:
        llm.close()
    print(out.text)
    num_tokens, num_steps = sum(len(step.unmasked) for step in out.steps), len(out.steps)
    print(
        f"{num_steps} steps, {num_tokens / num_steps:.1f} tokens/step, {len(out.token_ids)} tokens in the "
        f"answer, {duration_s:.2f} s, finished by {out.finish_reason}",
        file=sys.stderr,
    )
    return 0


def _encode(llm: LLM, prompt: str, raw: bool) -> list[int]:
    if llm.tokenizer is None:
        raise RequestError("this model folder has no tokenizer.json, so it cannot take text", "prompt")
    if raw:
        return llm.tokenizer.encode_prompt(prompt)
    return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _params(args: argparse.Namespace) -> DecodingParams:
    return DecodingParams(
        gen_length=args.gen_length,
        block_length=args.block_length,
        threshold=args.threshold,
        factor=args.factor,
        steps=args.steps,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
        refresh=args.refresh,
    )


def _decode(llm: LLM, prompt: list[int], params: DecodingParams) -> Completion:
    console = Console(stderr=True)
    if not console.is_terminal or llm.tokenizer is None:
        return llm.generate([prompt], params)[0]
    num_positions = params.gen_length or llm.info.default_gen_length
    view = CanvasView(llm.tokenizer, llm.info.eos_ids, len(prompt), num_positions)
    with Live(view.render(), console=console, auto_refresh=False) as live:

        def show(_: int, step: RequestStep) -> None:
            view.apply(step)
            live.update(view.render(), refresh=True)

        return llm.generate([prompt], params, on_step=show)[0]
