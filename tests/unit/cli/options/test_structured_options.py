"""Options that prescribe the form of an answer."""

from pathlib import Path

import pytest

from foreword.cli.options.structured import structured_choice
from foreword.errors import RequestError
from foreword.structured.params import StructuredOutputs


def test_each_option_is_a_form(tmp_path: Path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "a"')
    assert structured_choice(None, None, None, None) is None
    assert structured_choice(schema, None, None, None) == StructuredOutputs(json={"type": "object"})
    assert structured_choice(None, "a+", None, None) == StructuredOutputs(regex="a+")
    assert structured_choice(None, None, ["a", "b"], None) == StructuredOutputs(choice=("a", "b"))
    written = StructuredOutputs(grammar='root ::= "a"')
    assert structured_choice(None, None, None, str(grammar)) == written
    assert structured_choice(None, None, None, 'root ::= "a"') == written


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="--regex and --choice exclude each other"):
        structured_choice(None, "a", ["b"], None)
    with pytest.raises(RequestError, match="cannot be read"):
        structured_choice(tmp_path / "missing.json", None, None, None)
    with pytest.raises(RequestError, match="cannot be read"):
        structured_choice(None, None, None, str(tmp_path / "missing.gbnf"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(RequestError, match=r"--json-schema \S+broken.json is not JSON"):
        structured_choice(broken, None, None, None)
