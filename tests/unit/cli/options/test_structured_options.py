"""Options that prescribe the form of an answer."""

from pathlib import Path

import pytest

from foreword.cli.generate import StructuredOptions
from foreword.errors import RequestError
from foreword.structured.params import StructuredOutputs


def test_each_option_is_a_form(tmp_path: Path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.gbnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "a"')
    assert StructuredOptions(None, None, None, None).outputs() is None
    assert StructuredOptions(schema, None, None, None).outputs() == StructuredOutputs(json={"type": "object"})
    assert StructuredOptions(None, "a+", None, None).outputs() == StructuredOutputs(regex="a+")
    assert StructuredOptions(None, None, ["a", "b"], None).outputs() == StructuredOutputs(choice=("a", "b"))
    written = StructuredOutputs(grammar='root ::= "a"')
    assert StructuredOptions(None, None, None, str(grammar)).outputs() == written
    assert StructuredOptions(None, None, None, 'root ::= "a"').outputs() == written


def test_what_makes_no_sense_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="--regex and --choice exclude each other"):
        StructuredOptions(None, "a", ["b"], None).outputs()
    with pytest.raises(RequestError, match="cannot be read"):
        StructuredOptions(tmp_path / "missing.json", None, None, None).outputs()
    with pytest.raises(RequestError, match="cannot be read"):
        StructuredOptions(None, None, None, str(tmp_path / "missing.gbnf")).outputs()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(RequestError, match=r"--json-schema \S+broken.json is not JSON"):
        StructuredOptions(broken, None, None, None).outputs()
