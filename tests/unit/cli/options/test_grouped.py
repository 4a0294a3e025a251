"""Option groups become a command's options, nested groups too."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from foreword.cli.options.grouped import options_command


@dataclass(frozen=True)
class Place:
    device: Annotated[str, typer.Option(help="Device.")] = "auto"


@dataclass(frozen=True)
class Work:
    size: Annotated[int, typer.Option(min=1, help="Size.")]
    place: Place

    def __post_init__(self) -> None:
        if self.size == 7:
            raise typer.BadParameter("size 7 is taken")


@options_command
def work(*, name: Annotated[str, typer.Argument()] = "x", job: Work, loud: bool = False) -> None:
    """Work."""
    print(name, job.size, job.place.device, loud)


@pytest.mark.parametrize(
    ("args", "printed"),
    [
        (["--size", "2"], "x 2 auto False"),
        (["y", "--size", "3", "--device", "cpu", "--loud"], "y 3 cpu True"),
        (["--size", "0"], "Invalid value for '--size'"),
        (["--size", "7"], "size 7 is taken"),
        ([], "Missing option '--size'"),
    ],
)
def test_fields_are_options(args: list[str], printed: str):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(work)
    assert printed in CliRunner().invoke(app, args).output


def test_a_command_is_called_with_its_defaults(capsys: pytest.CaptureFixture[str]):
    work(size=4)
    assert capsys.readouterr().out == "x 4 auto False\n"
