"""The option that names a policy file."""

from pathlib import Path
from typing import Annotated

import typer

PolicyOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Rules for cohorts of requests: who guesses for whom, how far, and how a drafter is rolled out "
        "(docs/policy.md).",
    ),
]


def checked_policy(path: Path) -> Path:
    """The file, if its rules can be used; drafters are checked where they are made."""
    from foreword.control.policy_file.parsing import read_policy

    path = path.expanduser().resolve()
    read_policy(path)
    return path
