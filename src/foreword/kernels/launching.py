"""Triton kernels that can be recorded instead of launched, so that they can be compiled before a pass runs."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource

from foreword.kernels.recording import Variant, state


class NotCompiledError(Exception):
    """A variant is not in Triton's cache on disk."""


class Kernel:
    """A Triton kernel. `kernel[grid](...)` launches it, or records it while the thread is recording."""

    def __init__(self, jitted: Any) -> None:  # noqa: ANN401 - a JITFunction, or that of Triton's interpreter
        self.jitted = jitted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        missing = state.missing
        if missing is None:
            launch: Callable[..., object] = self.jitted[grid]
            return launch
        return partial(self._record, missing, grid)

    def _record(
        self, missing: dict[Variant, None], grid: tuple[int, ...], *args: object, **options: object
    ) -> None:
        thread, previous_hook = threading.get_ident(), knobs.runtime.jit_cache_hook

        def record_variant(*, fn: Any, compile: dict[str, Any], **more: Any) -> bool:  # noqa: A002, ANN401 - Triton's names
            """Record the variant that Triton would compile; return True, so that it does not.

            The hook is called in all threads; calls of other threads go to the previous hook.
            """
            if threading.get_ident() != thread:
                return bool(previous_hook and previous_hook(fn=fn, compile=compile, **more))
            missing[Variant(fn.module, fn.name, compile["specialization_data"])] = None
            return True

        knobs.runtime.jit_cache_hook = record_variant
        try:
            self.jitted.run(*args, grid=grid, warmup=True, **options)
        finally:
            knobs.runtime.jit_cache_hook = previous_hook

    def find(self, data: str) -> Any:  # noqa: ANN401 - Triton's
        """Return the compiled variant from Triton's cache; raise `NotCompiledError` if it is not there."""
        return self._preload(data, _OnDisk)

    def load(self, data: str) -> None:
        """Load a variant from Triton's cache onto the device; raise `NotCompiledError` if it is not there."""
        # Otherwise the first launch would load it, and a launch that is captured into a CUDA graph cannot.
        self.find(data)._init_handles()

    def compile(self, data: str) -> Any:  # noqa: ANN401 - Triton's
        """Compile a variant into Triton's cache, unless it is there; return it."""
        return self._preload(data, ASTSource)

    def _preload(self, data: str, source: type[ASTSource]) -> Any:  # noqa: ANN401 - Triton's
        device = triton.runtime.driver.active.get_current_device()
        _ = self.jitted.device_caches[device]  # sets `ASTSource`, which is replaced below
        original, self.jitted.ASTSource = self.jitted.ASTSource, source
        try:
            return self.jitted.preload(data)
        finally:
            self.jitted.ASTSource = original


class _OnDisk(ASTSource):  # type: ignore[misc]
    """Source that raises `NotCompiledError` instead of being compiled."""

    def make_ir(self, *_: object, **__: object) -> Any:  # noqa: ANN401 - Triton's
        raise NotCompiledError(self.name)


def kernel(*, do_not_specialize: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Return a decorator that makes a Triton kernel; values of the named integer arguments cause no variants."""

    def decorate(function: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(function, do_not_specialize=list(do_not_specialize)))

    return decorate
