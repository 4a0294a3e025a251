"""Foreword: exact speculative decoding for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.acceptance.params import SamplingParams
    from foreword.engine.adapters import LoRARequest
    from foreword.engine.config import EngineConfig
    from foreword.engine.engine import Engine
    from foreword.engine.llm import LLM
    from foreword.structured.params import StructuredOutputs, Thinking

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "SamplingParams",
    "StructuredOutputs",
    "Thinking",
    "__version__",
]

_HOMES = {
    "LLM": "foreword.engine.llm",
    "Engine": "foreword.engine.engine",
    "EngineConfig": "foreword.engine.config",
    "LoRARequest": "foreword.engine.adapters",
    "SamplingParams": "foreword.acceptance.params",
    "StructuredOutputs": "foreword.structured.params",
    "Thinking": "foreword.structured.params",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    # Looked up late so that `foreword --help` does not wait for torch.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'foreword' has no attribute {name!r}")
