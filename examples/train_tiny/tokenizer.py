"""The tiny tokenizer: byte-level BPE with single digits, LLaDA's special tokens and chat template.

Owns the vocabulary and the chat format. Knows nothing about masking or the model.

    python -m examples.train_tiny.tokenizer FOLDER     # trains one on the tasks and writes its two files
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import tasks

EOS, BOS, START_HEADER, END_HEADER, END_OF_TURN, MASK = SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|startoftext|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|mdm_mask|>",
]
EOS_ID, BOS_ID, MASK_ID = (SPECIAL_TOKENS.index(token) for token in (EOS, BOS, MASK))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def chat_text(prompt: str) -> str:
    """What CHAT_TEMPLATE renders for one user message and a generation prompt."""
    user, assistant = (f"{START_HEADER}{role}{END_HEADER}\n\n" for role in ("user", "assistant"))
    return f"{BOS}{user}{prompt.strip()}{END_OF_TURN}{assistant}"


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token ids of a chat with one user message, up to where the answer starts."""
    return tokenizer.encode(chat_text(prompt), add_special_tokens=False).ids


def decode_answer(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text before the first end-of-text token."""
    end = ids.index(EOS_ID) if EOS_ID in ids else len(ids)
    return tokenizer.decode(ids[:end])


def load(folder: Path) -> Tokenizer:
    """Reads tokenizer.json; raises FileNotFoundError where the folder has none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: make it with python -m examples.train_tiny.tokenizer {folder}")
    return Tokenizer.from_file(str(path))


def train(vocab_size: int, num_problems: int, seed: int) -> Tokenizer:
    """Trains on problems of the train split; the words of the pools weigh in with and without a space."""
    rng = random.Random(seed)
    pools = (tasks.NAMES, tasks.CITIES, tasks.ITEMS, tasks.JOBS, tasks.WORDS)
    corpus = ["user", "assistant", "system", "\n\n"] * 20_000
    corpus += [form for pool in pools for word in pool for form in (word, f" {word}")] * 300
    for _ in range(num_problems):
        problem = tasks.draw(rng, "train")
        corpus += [problem.prompt, problem.answer]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json as Hugging Face's AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "additional_special_tokens": [START_HEADER, END_HEADER, END_OF_TURN],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the tiny tokenizer on the tasks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=1152, help="at most")
    parser.add_argument("--problems", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    save(train(args.vocab_size, args.problems, args.seed), args.folder)


if __name__ == "__main__":
    main()
