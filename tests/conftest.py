"""Shared fixtures: golden checkpoints on disk, models loaded once per session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from dlmserve import LLM
from tests import golden_data
from tests.kernel_backends import backend as backend

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
# How long examples take is no test's business, and the fixtures that they share hold no state.
IGNORED = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("dlmserve", deadline=None, suppress_health_check=IGNORED)
hypothesis.settings.load_profile("dlmserve")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Step times that test servers measure are none of the user's, and the first one's serve all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folder of a golden checkpoint such as "llada/model_A", written on first use."""
    root, written = tmp_path_factory.mktemp("golden"), dict[str, Path]()

    def folder(name: str) -> str:
        if name not in written:
            written[name] = golden_data.write_checkpoint(name, root / name)
        return str(written[name])

    return folder


@pytest.fixture(scope="session")
def golden_llm(golden_folder: Callable[[str], str]) -> Iterator[Callable[..., LLM]]:
    """Loaded golden models, by name and TP degree."""
    loaded: dict[tuple[str, int], LLM] = {}

    def llm(name: str, tp_degree: int = 1) -> LLM:
        if (name, tp_degree) not in loaded:
            loaded[name, tp_degree] = LLM(golden_folder(name), tp_degree=tp_degree)
        return loaded[name, tp_degree]

    yield llm
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="session")
def tiny() -> LLM:
    return LLM("tiny")
