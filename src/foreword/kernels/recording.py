"""Records which Triton kernels a thread would launch, instead of launching them. Does not import Triton."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foreword.kernels.launching import Kernel


class Variant(NamedTuple):
    """A kernel and the types of its arguments: the unit that Triton compiles."""

    module: str  # of the kernel's function
    kernel: str  # name in the module
    data: str  # Triton's description of the arguments, for `JITFunction.preload`

    @property
    def function(self) -> "Kernel":
        """Import and return the kernel."""
        kernel: Kernel = getattr(import_module(self.module), self.kernel)
        return kernel


class Recording(threading.local):
    """Recording of a thread."""

    # Variants that are not loaded, in the order of their launches (a dict as an ordered set); None: not recording.
    missing: dict[Variant, None] | None = None


state = Recording()


def is_recording() -> bool:
    """Return whether this thread records kernels. They then do not run, so their outputs are not written."""
    return state.missing is not None


@contextmanager
def recording() -> Iterator[dict[Variant, None]]:
    """Record instead of launching in this thread; yield a dict that receives the variants that are not loaded."""
    previous, missing = state.missing, dict[Variant, None]()
    state.missing = missing
    try:
        yield missing
    finally:
        state.missing = previous
