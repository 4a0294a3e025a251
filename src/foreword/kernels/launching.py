"""Triton kernels that can be recorded instead of launched: so that a pass's kernels can be compiled before it runs."""

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
    """A kernel that is launched as Triton's are, `kernel[grid](...)`, unless the thread is recording."""

    def __init__(self, jitted: Any) -> None:  # noqa: ANN401 - Triton's, or its interpreter's
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
        thread, other = threading.get_ident(), knobs.runtime.jit_cache_hook

        def note(*, fn: Any, compile: dict[str, Any], **more: Any) -> bool:  # noqa: A002, ANN401 - Triton's names
            """Record what would be compiled; return True, so that Triton does not compile it."""
            if threading.get_ident() != thread:
                return bool(other and other(fn=fn, compile=compile, **more))
            missing[Variant(fn.module, fn.name, compile["specialization_data"])] = None
            return True

        knobs.runtime.jit_cache_hook = note
        try:
            self.jitted.run(*args, grid=grid, warmup=True, **options)
        finally:
            knobs.runtime.jit_cache_hook = other

    def find(self, data: str) -> Any:  # noqa: ANN401 - Triton's
        """Return a variant from Triton's cache. Raises `NotCompiledError`."""
        return self._preload(data, _OnDisk)

    def load(self, data: str) -> None:
        """Load a variant from Triton's cache onto the device. Raises `NotCompiledError`."""
        self.find(
            data
        )._init_handles()  # otherwise its first launch would, which may be one that is being captured

    def compile(self, data: str) -> Any:  # noqa: ANN401 - Triton's
        """Compile a variant into Triton's cache, unless it is there."""
        return self._preload(data, ASTSource)

    def _preload(self, data: str, source: type[ASTSource]) -> Any:  # noqa: ANN401 - Triton's
        device = triton.runtime.driver.active.get_current_device()
        _ = self.jitted.device_caches[device]  # sets the kind of source, which is replaced
        own, self.jitted.ASTSource = self.jitted.ASTSource, source
        try:
            return self.jitted.preload(data)
        finally:
            self.jitted.ASTSource = own


class _OnDisk(ASTSource):  # type: ignore[misc]
    """Source that is never compiled."""

    def make_ir(self, *_: object, **__: object) -> Any:  # noqa: ANN401 - Triton's
        raise NotCompiledError(self.name)


def kernel(*, do_not_specialize: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Make a kernel of a function; values of the named integers cause no variants."""

    def made(function: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(function, do_not_specialize=list(do_not_specialize)))

    return made
