"""Provenance of measurements."""

import os
import platform
import re
import shlex
import sys
from datetime import UTC, datetime

from foreword import __version__

_FOLDERS = re.compile(r"(^|=)/(?:[^/]+/)*")
"""Folders of absolute paths, also after a name as in `llama.cpp=/opt/bin/python`: left out as machine-specific."""


def made() -> dict[str, str]:
    """The command, version, day and machine of a measurement."""
    return {
        "command": shlex.join(["foreword", *(_FOLDERS.sub(r"\1", part) for part in sys.argv[1:])]),
        "version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
