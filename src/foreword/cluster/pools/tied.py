"""`python -m foreword.cluster.pools.tied PID ...`: runs `foreword ...` and ends when its parent does.

A member must not outlive its supervisor, because the next supervisor would start the member a second time.
"""

import ctypes
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # Linux: option of prctl that requests a signal when the parent dies
POLL_SECONDS = 1.0  # seconds between checks of the parent on systems that do not report its end


def main() -> None:
    """Request SIGTERM at the parent's death, then run the command."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    tie_to(parent)
    sys.argv = ["foreword", *arguments]
    runpy.run_module("foreword", run_name="__main__", alter_sys=True)


def tie_to(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Request the signal `number` for this process at the death of its parent, the process with this id.

    On Linux it comes at the end of the parent's thread that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    else:
        threading.Thread(target=end_after, args=(parent, time.sleep, number), daemon=True).start()
    if os.getppid() != parent:  # the parent ended before it could be watched
        sys.exit(1)


def end_after(
    parent: int, wait: Callable[[float], None] = time.sleep, number: signal.Signals = signal.SIGTERM
) -> None:
    """Send this process a signal when its parent ends, on systems without parent-death signals."""
    while os.getppid() == parent:
        wait(POLL_SECONDS)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
