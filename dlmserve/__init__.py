"""dlmserve: a server for diffusion language models. The public surface; heavy parts load on first use."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "DecodingParams", "__version__"]

if TYPE_CHECKING:
    from dlmserve.llm import LLM, DecodingParams


def __getattr__(name: str) -> object:
    if name in ("LLM", "DecodingParams"):
        from dlmserve import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'dlmserve' has no attribute '{name}'")
