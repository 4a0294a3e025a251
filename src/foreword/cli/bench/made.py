"""Where figures come from: no table without it."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime

from foreword import __version__


def made() -> dict[str, str]:
    """The command, version, day and machine of a measurement."""
    return {
        "command": shlex.join(["foreword", *sys.argv[1:]]),
        "version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
