"""`python -m foreword.learn.trainer PID NICE FILE HEAD ...`: runs `foreword ...`, which writes HEAD, then checks it.

The process closes the open file FILE as soon as its parent's end would kill it, even while it is paused. It has the
priority NICE.
"""

import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

from foreword.cluster.pools.tied import tie_to

FIRST_TO_END = "1000"  # Linux ends this process first if memory is full


def main() -> None:
    """Train; exit with the command's exit code, or 1 if the head has weights that are not finite."""
    parent, nice, file = map(int, sys.argv[1:4])
    head, arguments = Path(sys.argv[4]), sys.argv[5:]
    tie_to(parent, signal.SIGKILL)
    os.close(file)
    os.nice(nice)
    with suppress(OSError):  # only Linux has this file
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_END, encoding="ascii")
    sys.argv = ["foreword", *arguments]
    try:
        runpy.run_module("foreword", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
    check_finite(head)


def check_finite(head: Path) -> None:
    """Exit with a message if a weight of the head is not finite."""
    import torch

    from foreword.train.files import WEIGHTS
    from foreword.train.loop.output import read_weights

    for name, tensor in read_weights(head / WEIGHTS).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            sys.exit(f"the trained head has weights that are not finite: {name}")


if __name__ == "__main__":
    main()
