"""Records which Triton kernels a thread would launch, instead of launching them. Does not import Triton."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foreword.kernels.launching import Kernel


class Variant(NamedTuple):
    """A kernel and the kind of its arguments: one unit that Triton compiles."""

    module: str
    kernel: str
    data: str  # Triton's description of the arguments, for `JITFunction.preload`

    @property
    def function(self) -> "Kernel":
        found: Kernel = getattr(import_module(self.module), self.kernel)
        return found


class Recording(threading.local):
    """Recorded kernels of a thread."""

    # Variants in the order in which they occurred; None: kernels are launched.
    missing: dict[Variant, None] | None = None


state = Recording()


def is_recording() -> bool:
    """Return whether this thread records kernels; kernels then do not run, so their outputs are not written."""
    return state.missing is not None


@contextmanager
def recording() -> Iterator[dict[Variant, None]]:
    """Record instead of launching in this thread; yield a dict that receives the variants that are not loaded."""
    before, missing = state.missing, dict[Variant, None]()
    state.missing = missing
    try:
        yield missing
    finally:
        state.missing = before
