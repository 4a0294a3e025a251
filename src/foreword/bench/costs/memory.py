"""How much memory this process has taken."""

from pathlib import Path


def peak_resident_bytes() -> int:
    """Most memory that was resident at once, by the kernel's count.

    Read from /proc rather than getrusage, whose figure a child inherits from the process that forked it.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
