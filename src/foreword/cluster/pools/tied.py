"""`python -m foreword.cluster.pools.tied PID ...`: the command `foreword ...` that ends when its parent does.

A member must not outlive its watcher: another one is started in its place.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take SIGTERM, which lets answers end, for the parent's death; then be the command."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before it could be heard of
        sys.exit(1)
    sys.argv = ["foreword", *arguments]
    runpy.run_module("foreword", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
