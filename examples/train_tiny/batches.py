"""Training batches for the tiny model: which response positions are masked, and what each one counts.

Owns LLaDA's SFT objective (arXiv 2502.09992): the prompt stays clean, the response is masked with probability
t ~ U(0, 1). Knows nothing about the model or the optimiser. The batch of a step depends on (seed, step) only,
so a resumed run sees what an uninterrupted one would have seen.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench import tasks
from examples.train_tiny.decode import left_pad
from examples.train_tiny.tokenizer import EOS_ID, MASK_ID, encode_prompt

BLOCK_LENGTH = 32
# Tokens of a response, answer and EOS padding together; short ones are drawn more often as they cost less.
RESPONSE_LENGTHS = [16] * 3 + [32] * 8 + [64] * 5 + [128]
PADDING_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One problem: its canvas, and per canvas position whether it is masked and what its loss counts."""

    canvas: list[int]
    masked: list[bool]
    weight: list[float]
    scale: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded samples: ids and masked [rows, n], bias [rows, 1, 1, n]; target and weight [num_masked]."""

    ids: Tensor
    bias: Tensor
    masked: Tensor
    target: Tensor
    weight: Tensor


def mask_response(rng: random.Random, length: int, num_answer: int, mask_ratio: float) -> list[bool]:
    """Masked positions of a response of `length` tokens whose answer has `num_answer`.

    LLaDA's uniform mask or, one time in three, a state of semi-autoregressive decoding: the blocks before one
    are clean, the blocks after it masked. At least one position up to the first EOS is masked.
    """
    masked = [rng.random() < mask_ratio for _ in range(length)]
    if rng.random() < 1 / 3:
        start = BLOCK_LENGTH * rng.randint(0, num_answer // BLOCK_LENGTH)
        end = start + BLOCK_LENGTH
        masked = [i >= start and (i >= end or masked[i]) for i in range(length)]
    if not any(masked[: num_answer + 1]):
        masked[rng.randint(0, num_answer)] = True
    return masked


def make_sample(
    rng: random.Random, tokenizer: Tokenizer, problem: tasks.Problem, mask_ratio: float
) -> Sample:
    """Masks one problem. Weights follow 1/t, held below 1/0.3; EOS padding counts little.

    Raises ValueError where the answer and its EOS don't fit the longest response.
    """
    prompt = encode_prompt(tokenizer, problem.prompt)
    answer = tokenizer.encode(problem.answer, add_special_tokens=False).ids
    lengths = [length for length in RESPONSE_LENGTHS if length > len(answer)]
    if not lengths:
        longest = max(RESPONSE_LENGTHS)
        raise ValueError(f"answer of {len(answer)} tokens, wanted < {longest}: shorten task {problem.task}")
    length = rng.choice(lengths)
    response = answer + [EOS_ID] * (length - len(answer))
    # A long answer has more positions to learn from, but not in proportion more to learn.
    scale = math.sqrt(len(answer) + 1)
    position_weight = 1 / (max(mask_ratio, 0.3) * scale)
    weight = [position_weight * (1.0 if i <= len(answer) else PADDING_WEIGHT) for i in range(length)]
    masked = mask_response(rng, length, len(answer), mask_ratio)
    clean = len(prompt)
    return Sample(prompt + response, [False] * clean + masked, [0.0] * clean + weight, scale)


def pad(samples: list[Sample], scale: float) -> Batch:
    """Samples padded on the left, their weights divided by `scale`."""
    clean, bias = left_pad([sample.canvas for sample in samples])
    width = clean.shape[1]
    masked = torch.tensor([[False] * (width - len(sample.masked)) + sample.masked for sample in samples])
    weight = torch.tensor([[0.0] * (width - len(sample.weight)) + sample.weight for sample in samples])
    return Batch(clean.masked_fill(masked, MASK_ID), bias, masked, clean[masked], weight[masked] / scale)


def batches_of_step(
    tokenizer: Tokenizer, seed: int, step: int, num_samples: int, rows: int
) -> Iterator[Batch]:
    """The step's samples, mask ratios spread evenly over (0, 1), in batches of `rows` of similar length."""
    rng = random.Random(f"train/{seed}/{step}")
    samples = [
        make_sample(rng, tokenizer, tasks.draw(rng, "train"), (i + rng.random()) / num_samples)
        for i in range(num_samples)
    ]
    samples.sort(key=lambda sample: len(sample.canvas))
    total = sum(sample.scale for sample in samples)
    for first in range(0, num_samples, rows):
        yield pad(samples[first : first + rows], total)
