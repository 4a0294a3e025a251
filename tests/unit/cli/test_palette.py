"""Chat and page tell guesses from the target's own tokens by the same colours."""

import re
from importlib.resources import files

import pytest
from rich.color import Color
from rich.style import Style

from foreword.cli.chat.main import DRAFT_STYLE, OWN_STYLE


@pytest.mark.parametrize(("name", "style"), [("accepted", DRAFT_STYLE), ("own", OWN_STYLE)])
def test_the_page_has_the_colours_of_the_chat(name: str, style: str):
    sheet = (files("foreword.server.page") / "static" / "style.css").read_text(encoding="utf-8")
    (colour,) = re.findall(rf"--{name}: (#\w+);", sheet)
    shown = Style.parse(style).color
    assert shown is not None
    assert shown.get_truecolor() == Color.parse(colour).get_truecolor()
