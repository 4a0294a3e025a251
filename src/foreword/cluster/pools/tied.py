"""`python -m foreword.cluster.pools.tied PID ...`: the command `foreword ...` that ends when its parent does.

A member must not outlive its watcher: another one is started in its place.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1

POLL_SECONDS = 1.0
"""Between two checks of the parent, where the system does not report its end."""


def main() -> None:
    """Take SIGTERM, which lets answers end, for the parent's death; then be the command."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        threading.Thread(target=end_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before it could be heard of
        sys.exit(1)
    sys.argv = ["foreword", *arguments]
    runpy.run_module("foreword", run_name="__main__", alter_sys=True)


def end_after(parent: int, wait: Callable[[float], None] = time.sleep) -> None:
    """Send this process SIGTERM when `parent` is no longer its parent: for systems that cannot be asked to."""
    while os.getppid() == parent:
        wait(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
