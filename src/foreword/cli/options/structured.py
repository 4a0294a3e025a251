"""Options for structured output."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.options.common import read_text
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.structured.params import StructuredOutputs

JsonSchemaOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Constrain the answer to JSON that matches the schema in this file."),
]
RegexOption = Annotated[
    str | None,
    typer.Option(
        help=r"Constrain the answer to this regular expression; \d, \w, \s are ASCII unless it starts with (?u)."
    ),
]
ChoiceOption = Annotated[
    list[str] | None, typer.Option(help="Constrain the answer to one of these texts; repeatable.")
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|TEXT", help="Constrain the answer to this grammar: llama.cpp's GBNF, or Lark."
    ),
]


@dataclass(frozen=True)
class StructuredOptions:
    """The form of the answer; at most one is given."""

    json_schema: JsonSchemaOption = None
    regex: RegexOption = None
    choice: ChoiceOption = None
    grammar: GrammarOption = None

    def outputs(self) -> "StructuredOutputs | None":
        """Return the structured output that the options name; None: free text."""
        from foreword.structured.params import StructuredOutputs

        given = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--choice": self.choice or None,
            "--grammar": self.grammar,
        }
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise RequestError(f"{' and '.join(named)} exclude each other; give one")
        if self.json_schema is not None:
            return _of_schema(self.json_schema)
        if self.regex is not None:
            return StructuredOutputs(regex=self.regex)
        if self.choice:
            return StructuredOutputs(choice=self.choice)
        if self.grammar is not None:
            return StructuredOutputs(grammar=_text_of(self.grammar))
        return None


def _of_schema(file: Path) -> "StructuredOutputs":
    from foreword.structured.params import StructuredOutputs

    try:
        return StructuredOutputs(json=read_text(file))
    except RequestError as error:
        reason = str(error).removeprefix("structured outputs: json ")
        raise RequestError(reason if reason == str(error) else f"--json-schema {file} {reason}") from None


def _text_of(grammar: str) -> str:
    """A grammar as it stands, or the file that has it: no rule of a grammar is the name of a file."""
    return grammar if "::=" in grammar or "start:" in grammar else read_text(Path(grammar))
