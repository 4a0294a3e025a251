"""Which listed tokens spell a text."""

import pytest

from foreword.proofs.server.checks.texts import _offset_fault
from foreword.proofs.server.client import ReceivedChoice, ServerAnswer, Token


@pytest.mark.parametrize(
    ("text", "tokens", "reason", "fault"),
    [
        ("a cat", ["a", " cat"], "length", ""),
        ("a cat", [" a", " cat"], "length", ""),
        ("a", ["a", " cat"], "stop", ""),
        ("a", ["a", " cat"], "length", "do not spell the text"),
        ("a cat", ["a", "<|endoftext|>", " cat"], "length", ""),
        ("a cat", [], "length", ""),  # without log-probabilities nothing is listed
        ("a cat", ["a", " dog"], "length", "do not spell the text"),
    ],
)
def test_listed_tokens_spell_the_text(text: str, tokens: list[str], reason: str, fault: str):
    choice = ReceivedChoice(text, reason, [Token(one, 0.0, ()) for one in tokens])
    found = _offset_fault(ServerAnswer({}, {0: choice}))
    assert fault in found
    assert bool(found) == bool(fault)


def test_every_token_is_at_its_offset():
    def found(*offsets: int) -> str:
        choice = ReceivedChoice("a cat", "length", [Token("a", 0.0, ()), Token(" cat", 0.0, ())], [*offsets])
        return _offset_fault(ServerAnswer({}, {0: choice}))

    assert found(7, 8) == ""
    assert found(7, 9) == "token 0 has 1 characters, the next is 2 further"
