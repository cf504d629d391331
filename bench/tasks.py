"""Verifiable toy tasks: seeded problems with exact-match scorers, for training and for measuring quality.

Owns the wording, the answers, the split and the scorers. Knows nothing about models, tokenizers or servers.

Train and test never share a problem: what decides the answer of a problem (its key, not its wording) is
hashed, and one key in eight belongs to the test split.

    python bench/tasks.py --split test --n 5 --seed 1     # problems as JSON lines
"""

import argparse
import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

Split = Literal["train", "test"]

NAMES = ["Anna", "Ben", "Dana", "Emma", "Finn", "Hugo", "Mia", "Noah", "Paul", "Rosa"]
CITIES = ["Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Cairo", "Lima"]
ITEMS = ["apples", "books", "coins", "pens", "stamps", "cards", "eggs", "balls"]
JOBS = ["baker", "doctor", "teacher", "pilot", "farmer", "nurse", "driver", "singer"]
# fmt: off
WORDS = [
    "sun", "moon", "star", "tree", "river", "stone", "bird", "fish", "cat", "dog", "horse", "house",
    "door", "table", "chair", "road", "bridge", "boat", "train", "rain", "snow", "wind", "fire", "cloud",
    "leaf", "grass", "apple", "bread", "milk", "salt", "sugar", "tea", "gold", "iron", "paper", "glass",
]
# fmt: on


@dataclass(frozen=True, slots=True)
class Draft:
    """What a generator returns; `key` is the content that decides the answer."""

    key: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem; `answer` is one right answer, `score` knows the others."""

    task: str
    prompt: str
    answer: str
    key: str


def usual_or_other(rng: random.Random, usual: str, *others: str) -> str:
    """The usual wording two times in three: the wording of an answer is not fully predictable."""
    return usual if rng.random() < 2 / 3 else rng.choice(others)


def word_problem(rng: random.Random) -> Draft:
    """GSM8K in miniature: one to three operations, worked, then '#### N'."""
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    num_operations = rng.choice([1, 2, 2, 3])
    story, work, key, total = _opening(rng, name, item)
    while len(work) < num_operations:
        change = rng.randint(2, 9)
        takes = total > change and (total + change > 25 or rng.random() < 0.5)
        if takes:
            events = [
                f"{name} gives {change} to {other}.",
                f"{name} loses {change}.",
                f"{name} sells {change}.",
            ]
        else:
            events = [
                f"{name} buys {change} more.",
                f"{other} gives {name} {change} more.",
                f"{name} finds {change}.",
            ]
        story.append(rng.choice(events))
        sign, after = ("-", total - change) if takes else ("+", total + change)
        lead = usual_or_other(rng, "Then ", "Now ", "So ") if work else ""
        tail = usual_or_other(rng, ".", f" {item}.", " left." if takes else " in all.")
        work.append(f"{lead}{total}{sign}{change}={after}{tail}")
        key += f"{sign}{change}"
        total = after
    question = rng.choice([f"does {name} have now", "are there at the end"])
    story.append(f"How many {item} {question}?")
    return Draft(key, " ".join(story), " ".join(work) + f"\n#### {total}")


def _opening(rng: random.Random, name: str, item: str) -> tuple[list[str], list[str], str, int]:
    """First sentence of a word problem: (story, work, key, number of items so far)."""
    if rng.random() < 0.4:
        bags, each = rng.randint(2, 5), rng.randint(2, 6)
        product = f"{bags}*{each}={bags * each} {item}."
        work = usual_or_other(rng, product, f"The bags hold {product}")
        return [f"{name} has {bags} bags with {each} {item} each."], [work], f"{bags}*{each}", bags * each
    total = rng.randint(3, 15)
    return [f"{name} has {total} {item}."], [], str(total), total


def long_addition(rng: random.Random) -> Draft:
    """Column addition of two numbers of two or three digits, worked from the right."""
    num_digits = rng.choice([2, 2, 2, 3])
    a, b = (rng.randint(10 ** (num_digits - 1), 10**num_digits - 1) for _ in range(2))
    carry, work = 0, []
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        column = int(x) + int(y) + carry
        work.append(f"{x}+{y}" + (f"+{carry}" if carry else "") + f"={column}")
        carry = column // 10
    lead = rng.choice(["Digit by digit, what is {}?", "Add digit by digit: {}", "Add by columns: {}"])
    return Draft(f"{a}+{b}", lead.format(f"{a}+{b}"), ", ".join(work) + f"\n#### {a + b}")


def sums(rng: random.Random) -> Draft:
    """Two to four small sums and differences, all different, each written out."""
    count = rng.randint(2, 4)
    answers: dict[str, str] = {}
    while len(answers) < count:
        a, b = rng.randint(1, rng.choice([9, 9, 9, 15])), rng.randint(1, 9)
        minus = a > b and rng.random() < 0.4
        question = f"{a}-{b}" if minus else f"{a}+{b}"
        answers[question] = f"{question}={a - b if minus else a + b}"
    lead = rng.choice(["Work out", "Compute each"])
    return Draft(" ".join(answers), f"{lead}: {', '.join(answers)}", ", ".join(answers.values()))


def sort_numbers(rng: random.Random) -> Draft:
    """Three different numbers below 100 in order."""
    numbers = rng.sample(range(1, 100), 3)
    falling = rng.random() < 0.35
    lead = rng.choice(["Sort these numbers", "Put in order"])
    order = "largest" if falling else "smallest"
    prompt = f"{lead}, {order} first: {', '.join(map(str, numbers))}"
    return Draft(f"{falling}{numbers}", prompt, ", ".join(map(str, sorted(numbers, reverse=falling))))


def reverse_words(rng: random.Random) -> Draft:
    """Words in the opposite order."""
    words = rng.sample(WORDS, rng.randint(3, 7))
    lead = rng.choice(["Reverse the order of the words", "Write these words backwards, last word first"])
    return Draft(" ".join(words), f"{lead}: {' '.join(words)}", " ".join(reversed(words)))


def to_json(rng: random.Random) -> Draft:
    """Fields of a sentence as a JSON object."""
    name, city, job, age = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS), rng.randint(18, 79)
    facts = {"name": name, "age": age, "city": city, "job": job}
    fields = ["name"] + [field for field in ("age", "city", "job") if rng.random() < 0.7]
    text = rng.choice(
        [
            f"{name} is {age} years old, lives in {city} and works as a {job}.",
            f"{name}, a {job} from {city}, is {age}.",
            f"The {job} {name} is {age} and lives in {city}.",
        ]
    )
    answer = json.dumps({field: facts[field] for field in fields})
    wanted = ", ".join(fields)
    prompt = rng.choice([f"{text} Give {wanted} as JSON.", f"Write {wanted} as JSON. {text}"])
    return Draft(f"{name}{age}{city}{job}{fields}", prompt, answer)


def json_list(rng: random.Random) -> Draft:
    """Words as a JSON list."""
    words = rng.sample(NAMES + CITIES + JOBS, rng.randint(2, 6))
    lead = rng.choice(["Write as a JSON list", "Make a list in JSON"])
    return Draft(" ".join(words), f"{lead}: {' '.join(words)}", json.dumps(words))


def records(rng: random.Random) -> Draft:
    """One to five people as a JSON list of objects: the longest answers."""
    count = rng.randint(1, 5)
    people = list(
        zip(
            rng.sample(NAMES, count),
            rng.sample(range(18, 80), count),
            rng.choices(CITIES, k=count),
            strict=True,
        )
    )
    text = "; ".join(f"{name} {age} {city}" for name, age, city in people)
    answer = json.dumps([{"name": name, "age": age, "city": city} for name, age, city in people])
    lead = rng.choice(["Write as JSON records", "Make JSON records"])
    return Draft(text, f"{lead}: {text}", answer)


def count_on(rng: random.Random) -> Draft:
    """An arithmetic progression."""
    start, step, count = rng.randint(1, 40), rng.choice([1, 2, 5, 10]), rng.randint(3, 7)
    wordings = [
        f"Start at {start} and count by {step}. Give {count} numbers.",
        f"Give {count} numbers from {start} in steps of {step}.",
    ]
    answer = ", ".join(str(start + step * i) for i in range(count))
    return Draft(f"{start},{step},{count}", rng.choice(wordings), answer)


ARITHMETIC = [
    ("adds {n} to {v}", "{v}+{n}"),
    ("subtracts {n} from {v}", "{v}-{n}"),
    ("multiplies {v} by {n}", "{v}*{n}"),
]
OPERATIONS = ARITHMETIC + [
    ("divides {v} by {n}", "{v}//{n}"),
    ("tells whether {v} is greater than {n}", "{v}>{n}"),
    ("tells whether {v} equals {n}", "{v}=={n}"),
    ("gives the remainder of {v} by {n}", "{v}%{n}"),
    ("repeats {v} {n} times", "[{v}]*{n}"),
]


def python_line(rng: random.Random) -> Draft:
    """A one-line Python function from its description."""
    function, variable = rng.choice(["f", "g", "run", "calc", "work"]), rng.choice("xyzabn")
    (words, code), number = rng.choice(OPERATIONS), rng.randint(2, 30)
    said, expression = words.format(v=variable, n=number), code.format(v=variable, n=number)
    if rng.random() < 0.35:
        (words, code), number = rng.choice(ARITHMETIC), rng.randint(2, 30)
        said += " and then " + words.format(v="that", n=number)
        expression = code.format(v=f"({expression})", n=number)
    call = f"{function}({variable})"
    wordings = [f"Write a Python function {call} that {said}.", f"Define {call} in Python. It {said}."]
    return Draft(f"{call}{said}", rng.choice(wordings), f"def {call}: return {expression}")


def any_order(rng: random.Random) -> Draft:
    """The given words in any order: a joint choice, where unmasking in parallel can go wrong."""
    words = rng.sample(WORDS, rng.randint(2, 5))
    answer = list(words)
    if rng.random() < 0.6:
        i = rng.randrange(len(words) - 1)
        answer[i], answer[i + 1] = answer[i + 1], answer[i]
    lead = rng.choice(["Write these words once each, in any order", "Shuffle the words"])
    return Draft(" ".join(words), f"{lead}: {' '.join(words)}", " ".join(answer))


Generator = Callable[[random.Random], Draft]
GENERATORS: dict[str, Generator] = {
    f.__name__: f
    for f in (
        word_problem,
        long_addition,
        sums,
        sort_numbers,
        reverse_words,
        to_json,
        json_list,
        count_on,
        python_line,
        any_order,
        records,
    )
}
TASKS = list(GENERATORS)
# Shares of the training mix: harder tasks are drawn more often.
WEIGHTS = {
    "word_problem": 2.5,
    "long_addition": 2.5,
    "sums": 1.5,
    "sort_numbers": 1.0,
    "reverse_words": 0.4,
    "to_json": 0.4,
    "json_list": 0.6,
    "count_on": 1.0,
    "python_line": 0.4,
    "any_order": 0.5,
    "records": 4.0,
}


def split_of(task: str, key: str) -> Split:
    """The split that owns the problems with this key."""
    return "test" if hashlib.md5(f"{task}{key}".encode()).digest()[0] % 8 == 0 else "train"


def draw(rng: random.Random, split: Split, task: str | None = None) -> Problem:
    """One problem of the split; the task comes from WEIGHTS where none is named."""
    if task is None:
        task = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    while True:
        draft = GENERATORS[task](rng)
        if split_of(task, draft.key) == split:
            return Problem(task, draft.prompt, draft.answer, draft.key)


def problems(split: Split, num_problems: int, seed: int) -> list[Problem]:
    """The tasks in turn; the same arguments give the same problems on any machine."""
    rng = random.Random(f"{split}/{seed}")
    return [draw(rng, split, TASKS[i % len(TASKS)]) for i in range(num_problems)]


def score(problem: Problem, text: str) -> bool:
    """True where the text is a right answer: an exact match where only one is right."""
    text = text.strip()
    if problem.task in ("word_problem", "long_addition"):
        found = re.search(r"####\s*(-?\d+)$", text)
        return found is not None and found.group(1) == problem.answer.split("#### ")[1]
    if problem.task == "any_order":
        return sorted(text.split()) == sorted(problem.answer.split())
    return text == problem.answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints problems as JSON lines.")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for problem in problems(args.split, args.n, args.seed):
        print(json.dumps(asdict(problem)))


if __name__ == "__main__":
    main()
