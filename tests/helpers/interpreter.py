"""Triton's interpreter as the tests need it: it rounds as a GPU does, and prepares its language once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter


def prepare_interpreter() -> None:
    _round_as_a_gpu_does()
    _patch_the_language_once()
    _look_types_up_once()
    options = interpreter.interpreter_builder.options
    # Numbers of tests are small: no sum overflows.
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _round_as_a_gpu_does() -> None:
    """Round to e4m3 through torch: the interpreter's own rounding takes halves up and loses carries.

    What is below bf16's smallest normal number is 0 in its float32, too, unless it is told how to convert.
    """
    convert = interpreter._convert_float

    def rounded(numbers: Any, kind: Any, to: Any, mode: Any) -> Any:
        if (kind, to) == (language.bfloat16, language.float32):
            return numbers.view(np.uint16).astype(np.uint32) << 16
        if to != language.float8e4nv or kind != language.float32:
            return convert(numbers, kind, to, mode)
        exact = torch.from_numpy(numbers.view(np.float32)).to(torch.float8_e4m3fn)
        return exact.view(torch.uint8).numpy()

    interpreter._convert_float = rounded


def _patch_the_language_once() -> None:
    """Leave the language as the first kernel of a module has it patched.

    The interpreter looks through all of `triton.language` at every launch and at every call of a device function,
    which takes longer than the function.
    """
    patch = interpreter._patch_lang
    modules: set[str] = set()

    def patched(function: Any) -> Any:
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched


def _look_types_up_once() -> None:
    """Keep NumPy's types by name: the interpreter makes a table of all types whenever it needs one."""
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def known(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    interpreter._get_np_dtype = known
