"""Whether a thread records Triton kernels instead of launching them; importing this imports no Triton."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foreword.kernels.launching import Kernel


class Variant(NamedTuple):
    """A kernel for arguments of one kind: what Triton compiles, and what it needs for that."""

    module: str
    kernel: str
    data: str  # Triton's description of it, for `JITFunction.preload`

    @property
    def of(self) -> "Kernel":
        found: Kernel = getattr(import_module(self.module), self.kernel)
        return found


class Recording(threading.local):
    """Recorded kernels of a thread."""

    # Variants in the order in which they occurred; None: kernels are launched.
    missing: dict[Variant, None] | None = None


state = Recording()


def is_recording() -> bool:
    """Return whether this thread records kernels instead of launching them: no kernel writes anything."""
    return state.missing is not None


@contextmanager
def recording() -> Iterator[dict[Variant, None]]:
    """Launch nothing in this thread; the result fills with the variants that are not loaded."""
    before, missing = state.missing, dict[Variant, None]()
    state.missing = missing
    try:
        yield missing
    finally:
        state.missing = before
