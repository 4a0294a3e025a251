"""Options for structured output."""

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


def structured_choice(
    json_schema: Path | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> "StructuredOutputs | None":
    """What the options mean together; at most one of them is given."""
    from foreword.structured.params import StructuredOutputs

    given = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--choice": choice or None,
        "--grammar": grammar,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise RequestError(f"{' and '.join(named)} exclude each other; give one")
    if json_schema is not None:
        try:
            return StructuredOutputs(json=read_text(json_schema))
        except RequestError as error:
            told = str(error).removeprefix("structured outputs: json ")
            raise RequestError(
                told if told == str(error) else f"--json-schema {json_schema} {told}"
            ) from None
    if regex is not None:
        return StructuredOutputs(regex=regex)
    if choice:
        return StructuredOutputs(choice=choice)
    if grammar is not None:
        return StructuredOutputs(grammar=_text_of(grammar))
    return None


def _text_of(grammar: str) -> str:
    """A grammar as it stands, or the file that has it: no rule of a grammar is the name of a file."""
    return grammar if "::=" in grammar or "start:" in grammar else read_text(Path(grammar))
