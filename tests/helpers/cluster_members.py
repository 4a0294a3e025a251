"""The processes of a cluster."""

from pathlib import Path


def pids(*words: str) -> set[int]:
    """Members with these words in their command."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "foreword.cluster.pools.tied" in command and all(word in command for word in words):
            found.add(int(path.parent.name))
    return found
