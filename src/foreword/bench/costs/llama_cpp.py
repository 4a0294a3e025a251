"""llama.cpp through llama-cpp-python. Nothing here needs torch: it also runs in an environment of its own."""

import ctypes
import importlib
from pathlib import Path
from typing import Any

from foreword.errors import ForewordError, RequestError

FILE_TYPES = {"Q8_0": 7, "Q4_0": 2}
"""Formats that llama.cpp is measured in, with its own numbers for them."""


def _drop(level: int, text: bytes, data: int) -> None:
    """Take a log line and forget it."""


# Lives as long as the module: llama.cpp keeps the pointer.
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_drop)


class LlamaCppError(ForewordError):
    """llama.cpp refused a file or a pass."""


def load_llama_cpp() -> Any:  # noqa: ANN401
    """The bindings, silenced; one line if they are not installed."""
    try:
        library = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise RequestError(
            "--compare llama.cpp needs llama-cpp-python: pip install 'foreword[compare]' (compiles for minutes)"
        ) from error
    library.llama_log_set(_SILENT, ctypes.c_void_p(0))
    library.llama_backend_init()
    return library


def quantized_copy(source: Path, directory: Path, kind: str) -> Path:
    """The model in llama.cpp's format `kind`, made by llama.cpp itself and kept for the next time."""
    library = load_llama_cpp()
    target = directory / f"{source.stem}.{kind}.gguf"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    settings = library.llama_model_quantize_default_params()
    settings.ftype = FILE_TYPES[kind]
    settings.allow_requantize = True
    unfinished = target.with_suffix(".part")
    if library.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(settings)):
        raise LlamaCppError(f"llama.cpp cannot write {source} as {kind}; give a .gguf file that it can read")
    return unfinished.rename(target)
