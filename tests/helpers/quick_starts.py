"""What engines and commands do at every start is done less often: tests start hundreds of them."""

from functools import cache

import typer.main

from foreword.engine import profiles

WHOLE = {"ROWS": profiles.ROWS, "ROUNDS": profiles.ROUNDS}
SHORT = {"ROWS": (1, 2, 4, 8, 16, 64), "ROUNDS": 2}


def prepare_quick_starts() -> None:
    """Engines of this process measure fewer passes; its command line is put together once."""
    for name, value in SHORT.items():
        setattr(profiles, name, value)
    typer.main.get_command = cache(typer.main.get_command)
