"""Threshold decoding in blocks, with or without the dual cache (Fast-dLLM, arXiv 2505.22618).

Owns the unmasking loop over a padded batch: a short reference, not how dlmserve serves. Knows nothing about
texts or tasks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.train_tiny.model import DualCache, LLaDA
from examples.train_tiny.tokenizer import EOS_ID, MASK_ID


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to decode; `gen_length` is a multiple of `block_length`, both in tokens."""

    threshold: float = 0.9
    gen_length: int = 128
    block_length: int = 32
    dual_cache: bool = False


def left_pad(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids [rows, width] padded on the left, and the bias [rows, 1, 1, width] that hides the padding.

    Rotary positions are relative, so the shift changes nothing else.
    """
    width = max(map(len, prompts))
    num_padding = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[EOS_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    is_padding = torch.arange(width)[None] < num_padding[:, None]
    bias = torch.zeros(len(prompts), 1, 1, width).masked_fill_(is_padding[:, None, None], float("-inf"))
    return ids, bias


def unmask(block: Tensor, logits: Tensor, threshold: float) -> Tensor:
    """One step over a block [rows, block_length]: what reaches the threshold, or the best guess."""
    # An untrained model may prefer the mask token: put back each time, it would keep the block from ever ending.
    logits = logits.float().index_fill(-1, torch.tensor([MASK_ID]), float("-inf"))
    confidence, guess = logits.softmax(-1).max(-1)
    masked = block == MASK_ID
    confidence = confidence.masked_fill(~masked, -1.0)
    chosen = confidence >= threshold
    chosen[torch.arange(len(block)), confidence.argmax(-1)] = True
    return torch.where(chosen & masked, guess, block)


@torch.inference_mode()
def generate(model: LLaDA, prompts: list[list[int]], how: Decoding) -> tuple[list[list[int]], list[int]]:
    """The `gen_length` generated ids of each prompt, and the denoising steps each took. No early stop."""
    prompt_ids, prompt_bias = left_pad(prompts)
    rows, width = prompt_ids.shape
    canvas = torch.cat([prompt_ids, torch.full((rows, how.gen_length), MASK_ID)], 1)
    bias = torch.cat([prompt_bias, torch.zeros(rows, 1, 1, how.gen_length)], -1)
    num_steps = torch.zeros(rows, dtype=torch.long)
    for start in range(width, width + how.gen_length, how.block_length):
        end = start + how.block_length
        active = torch.arange(rows)
        cache = DualCache() if how.dual_cache else None
        while len(active):
            if cache is not None and cache.layers:
                logits = model(canvas[active, start:end], bias[active], start=start, cache=cache)
            else:
                logits = model(canvas[active], bias[active], cache=cache)[:, start:end]
            block = unmask(canvas[active, start:end], logits, how.threshold)
            canvas[active, start:end] = block
            num_steps[active] += 1
            unfinished = (block == MASK_ID).any(-1)
            active = active[unfinished]
            if cache is not None:
                cache.keep_rows(unfinished)
    return canvas[:, width:].tolist(), num_steps.tolist()
