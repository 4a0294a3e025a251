"""Files with the addresses of members, for those that read them again and again."""

import os
from collections.abc import Iterable
from pathlib import Path

from foreword.cluster.pools.members import NODE, TARGET


def write_lists(folder: Path, members: Iterable[tuple[str, str]]) -> None:
    """The nodes and the targets among (kind, address); a file changes as a whole or not at all."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = list(members)
    for name, kind in (("nodes", NODE), ("targets", TARGET)):
        path = folder / name
        text = "".join(f"{address}\n" for its_kind, address in known if its_kind == kind)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
