import pytest
from typer.main import get_command

from foreword.cli.main import KNOWN_ELSEWHERE, app, suggested

COMMANDS = list(get_command(app).commands)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("llama-cli", ["chat", "generate"]),
        ("serv", ["serve"]),
        ("genrate", ["generate"]),
        ("list", ["models"]),
        ("quantize", []),
        ("rm", []),
    ],
)
def test_an_unknown_command_suggests_what_is_meant(name: str, meant: list[str]):
    assert suggested(name, COMMANDS) == meant


def test_only_commands_that_exist_are_suggested():
    assert {name for names in KNOWN_ELSEWHERE.values() for name in names} <= {*COMMANDS, "--version"}
    assert not KNOWN_ELSEWHERE.keys() & set(COMMANDS), "a name that exists needs no suggestion"
