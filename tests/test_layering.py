"""The rules of docs/architecture.md on imports and file length, checked on the source text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "dlmserve"
FILES = sorted(ROOT.rglob("*.py"))
MAX_LINES = 400

# Clocks, randomness, threads and sockets: what makes a decision depend on more than its arguments.
IMPURE = {
    "aiohttp", "asyncio", "multiprocessing", "os", "random", "secrets", "socket", "subprocess", "threading",
    "time", "uvloop", "zmq",
}  # fmt: skip
HEAVY = {"catboost", "cvxpy", "torch", "transformers"}

# The layers from the bottom up: a file may import its own layer and those that `MAY_USE` lists.
MAY_USE = {
    "errors": set(),
    "logs": {"errors"},
    "grid": set(),
    "messages": {"errors", "grid"},
    "keys": {"errors"},
    "config": {"errors", "messages"},
    "checkpoint": {"errors"},
    "tokenizer": {"errors", "checkpoint"},
    "profiles": {"errors"},
    "transport": {"errors", "keys", "messages", "config"},
    "control/policy": {"errors", "messages", "config"},
    "control": {"errors", "keys", "messages", "config", "checkpoint", "transport", "control/policy"},
    "control/planning": {"errors", "messages", "config", "control/policy", "worker/lifeline"},
    "simulation": {"errors", "messages", "config", "control/policy"},
    "simulator": {"errors", "messages", "config", "control/policy", "control/planning", "simulation"},
    "server": {
        "errors", "logs", "grid", "messages", "config", "checkpoint", "tokenizer", "control", "control/policy",
    },
    "kernels": {"errors"},
    "worker/lifeline": {"errors", "keys", "messages", "config", "transport"},
    "worker": {
        "worker/lifeline", "errors", "keys", "logs", "messages", "config", "checkpoint", "transport", "kernels",
        "profiles",
    },
}  # fmt: skip
# bench.py, cli.py, llm.py, profile.py, simulate.py, train_predictor.py, training/, __init__.py and __main__.py see both
# sides.

MAY_USE_TORCH = ("worker/", "kernels/", "llm.py", "training/")
# These run where there is no torch, though their layer has it.
NEVER_TORCH = ("worker/agent.py", "worker/lifeline.py")
ONLY_IN = {"catboost": "control/policy/step_predictor.py", "cvxpy": "control/planning/"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(name: str) -> str | None:
    """The layer of a file (`control/policy/request.py`); None for those that see both sides."""
    matches = [layer for layer in MAY_USE if name == f"{layer}.py" or name.startswith(f"{layer}/")]
    return max(matches, key=len, default=None)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module, as dotted names, and whether that happens at the top level of the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            yield from ((f"{node.module}.{alias.name}", id(node) in at_top) for alias in node.names)


def imported_file(module: str) -> str | None:
    """The file that a dotted name leads to: `dlmserve.control.loop.Head` -> `control/loop.py`."""
    parts = module.split(".")
    if parts[0] != "dlmserve" or parts[-1] == "__version__":
        return None
    for length in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[1:length])
        if path.with_suffix(".py").exists():
            return name_of(path.with_suffix(".py"))
        if (path / "__init__.py").exists():
            return name_of(path / "__init__.py")
    return "__init__.py"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    layer = layer_of(name_of(path))
    if layer is None:
        return
    for module, _ in imports(path):
        target = imported_file(module)
        target_layer = layer_of(target) if target else layer
        assert target_layer in MAY_USE[layer] | {layer}, f"{name_of(path)} ({layer}) may not import {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_decisions_depend_on_their_arguments_only(path: Path) -> None:
    pure = ("control/policy/", "simulation/", "simulator.py", "messages.py", "errors.py")
    if not name_of(path).startswith(pure):
        return
    for module, _ in imports(path):
        assert module.split(".")[0] not in IMPURE, f"{name_of(path)} may not import {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    name = name_of(path)
    for module, at_top in imports(path):
        package = module.split(".")[0]
        if package == "torch":
            allowed = name.startswith(MAY_USE_TORCH) and name not in NEVER_TORCH
            assert allowed, f"{name} may not import torch: it runs in a process without it"
        elif package in HEAVY:
            assert not at_top, f"{name} imports {package} at the top: every start would wait for it"
            assert name.startswith(ONLY_IN.get(package, name)), (
                f"only {ONLY_IN.get(package)} may import {package}"
            )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_are_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{name_of(path)} has {num_lines} lines: split it"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_say_what_they_own(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name_of(path)} has no docstring"
