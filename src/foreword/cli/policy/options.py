"""The option that names a policy file."""

from pathlib import Path
from typing import Annotated

import typer

PolicyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Policy file: drafters and limits by cohort of requests, and roll-outs (docs/policy.md).",
    ),
]


def checked_policy(path: Path) -> Path:
    """The file, if its rules can be used; drafters are checked where they are made."""
    from foreword.control.policy_file.parsing import read_policy

    path = path.expanduser().resolve()
    read_policy(path)
    return path
