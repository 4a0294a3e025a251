"""`foreword generate`: answer one prompt, from an argument, a file or a pipe."""

import select
import stat
import sys
from dataclasses import asdict, dataclass
from os import fstat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword.cli.console import load_llm, print_json, stderr, stdout, visible
from foreword.cli.options.common import JsonOption, read_text
from foreword.cli.options.grouped import argument, flag, option, options_command
from foreword.cli.options.model import (
    DEFAULT_MODEL,
    ComputeOptions,
    GenerationConfigOption,
    LoraOption,
    ModelOption,
    SpeculationOptions,
    SystemOption,
    lora_request,
)
from foreword.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foreword.acceptance.params import SamplingParams
    from foreword.engine.llm import LLM
    from foreword.engine.outputs import RequestOutput
    from foreword.structured.params import StructuredOutputs

_PATIENCE = 2.0  # seconds without input from the pipe before the command prints that it is waiting


def read_prompt(prompt: str | None, file: Path | None, stdin_is_free: bool = True) -> str:
    """Return piped text, if there is any, followed by the prompt from the argument or the file.

    A final line end of a file or pipe is removed. `stdin_is_free` is false if --prediction is read from there.
    """
    if prompt is not None and file is not None:
        raise RequestError("there is a prompt and a --file; give one")
    if prompt == "-" or file == Path("-") or (prompt is None and file is None):
        if not stdin_is_free:
            raise RequestError("standard input cannot be both prompt and --prediction; give a file")
        return _from_stdin(must_be_piped=prompt is None and file is None)
    question = prompt if file is None else _text_of(file)
    if not question:
        raise RequestError(f"{file or 'the prompt'} is empty")
    context = _piped_text() if stdin_is_free else ""
    return f"{context}\n\n{question}" if context else question


def _from_stdin(must_be_piped: bool) -> str:
    """Return the prompt on standard input; with `must_be_piped`, raise `RequestError` for a terminal."""
    if must_be_piped and sys.stdin.isatty():
        raise RequestError("there is no prompt; give one as an argument, with --file, or through a pipe")
    prompt = _text_of(Path("-"))
    if not prompt:
        raise RequestError("standard input is empty; pipe a prompt in or give one")
    return prompt


def _piped_text() -> str:
    """Return text from a pipe or redirected file; empty for a terminal, socket or /dev/null."""
    try:
        kind = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or not a file
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return ""
    if not select.select([sys.stdin], [], [], _PATIENCE)[0]:
        stderr.print("[dim]waiting for standard input to end; to give none, add </dev/null ...[/dim]")
    return _text_of(Path("-"))


def _text_of(path: Path) -> str:
    return read_text(path).removesuffix("\n")


@dataclass(frozen=True)
class StructuredOptions:
    """Response format; at most one is given."""

    json_schema: Path | None = option(None, "Constrain the answer to this JSON schema.", metavar="FILE")
    regex: str | None = option(
        None, r"Constrain the answer to this regular expression; \d, \w and \s are ASCII."
    )
    choice: list[str] | None = option(None, "Constrain the answer to one of these texts; repeatable.")
    grammar: str | None = option(None, "Constrain the answer to this grammar.", metavar="FILE|TEXT")

    def outputs(self) -> "StructuredOutputs | None":
        """Return the structured output that the options specify; None: free text."""
        from foreword.structured.params import StructuredOutputs

        values = {
            "--json-schema": self.json_schema,
            "--regex": self.regex,
            "--choice": self.choice or None,
            "--grammar": self.grammar,
        }
        names = [name for name, value in values.items() if value is not None]
        if len(names) > 1:
            raise RequestError(f"{' and '.join(names)} exclude each other; give one")
        if self.json_schema is not None:
            return _of_schema(self.json_schema)
        if not names:
            return None
        grammar = None if self.grammar is None else _grammar_text(self.grammar)
        return StructuredOutputs(regex=self.regex, choice=self.choice or None, grammar=grammar)


def _of_schema(file: Path) -> "StructuredOutputs":
    """Return the structured output of a schema file, which is named in errors."""
    from foreword.structured.params import StructuredOutputs

    try:
        return StructuredOutputs(json=read_text(file))
    except RequestError as error:
        reason = str(error).removeprefix("structured outputs: json ")
        raise RequestError(reason if reason == str(error) else f"--json-schema {file} {reason}") from None


def _grammar_text(grammar: str) -> str:
    """Return the grammar. A text with `::=` or `start:` is a grammar; any other text is a file name."""
    return grammar if "::=" in grammar or "start:" in grammar else read_text(Path(grammar))


@dataclass(frozen=True)
class PromptOptions:
    """The prompt."""

    prompt: str | None = argument(
        None,
        "Prompt, sent through the model's chat template; - or nothing: standard input. "
        "Piped text is put before a given prompt.",
    )
    file: Path | None = option(None, "Read the prompt from this file.")
    system: SystemOption = None
    prediction: Path | None = option(None, "File with the expected answer, which is used as a draft.")
    raw: bool = flag("Continue the prompt without a chat template.")
    parse_special: bool = option(
        True, "With --raw: turn names of control tokens, such as <|im_end|>, into these tokens."
    )
    suffix: str | None = option(
        None,
        "Fill in the middle: write the text between the prompt and this suffix, without a chat template. "
        "Needs a model with fill-in-the-middle tokens.",
    )

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise RequestError("--raw continues a text as it is; a --system message needs the chat template")
        if self.suffix and self.system is not None:
            raise RequestError("--suffix fills a gap in a text; a --system message needs the chat template")


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters; None: the model's default."""

    temperature: float | None = option(None, "Sampling temperature; 0 is greedy.")
    top_p: float | None = option(None, "Nucleus sampling: probability mass of the tokens kept, such as 0.9.")
    top_k: int | None = option(None, "Sample from the k most likely tokens; 0: all.")
    min_p: float | None = option(None, "Least probability relative to the most likely token, such as 0.05.")
    repetition_penalty: float | None = option(None, "Penalty on repeated tokens, such as 1.1; 1: none.")
    max_tokens: int = option(256, "Maximum number of tokens to generate.")
    stop: list[str] | None = option(None, "End the answer before this text; repeatable.")
    n: int = option(1, "Number of answers to the prompt.", "-n")
    seed: int | None = option(None, "Random seed; the same seed gives the same text. Default: a fresh one.")


@options_command
def generate(
    *,
    options: PromptOptions,
    model: ModelOption = DEFAULT_MODEL,
    sampling: SamplingOptions,
    drafting: SpeculationOptions,
    generation_config: GenerationConfigOption = "auto",
    lora: LoraOption = None,
    structured: StructuredOptions,
    compute: ComputeOptions,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt, streaming text to the terminal.

    Example: foreword generate "Explain why the sky is blue." --temperature 0 --max-tokens 64
    """
    from foreword.acceptance.params import SamplingParams

    fields = asdict(sampling) | {"stop": tuple(sampling.stop or ()), "structured": structured.outputs()}
    # Invalid values are refused before the model is loaded.
    SamplingParams(**{name: value for name, value in fields.items() if value is not None})
    question = read_prompt(options.prompt, options.file, stdin_is_free=options.prediction != Path("-"))
    prediction = None if options.prediction is None else read_text(options.prediction)
    llm = load_llm(
        model,
        **asdict(compute),
        speculation=drafting.choice(),
        generation_config=generation_config,
        answers=sampling.n,
    )
    params = llm.loaded.sampling.params(**fields)
    is_streamed = not as_json and sampling.n == 1
    shared = {
        "prediction": prediction,
        "lora_request": lora_request(lora),
        "on_text": _show if is_streamed else None,
    }
    output = _answer(llm, question, params, options, shared)
    for answer in output.outputs:
        if answer.error is not None:
            raise RequestError(answer.error)
    if as_json:
        print_json(output.as_json())
        return
    if not is_streamed:
        for answer in output.outputs:
            stdout.print(f"[bold]answer {answer.index}[/bold]")
            _show(0, answer.text + "\n")
    stdout.print()
    defaults = {name: value for name, value in llm.loaded.sampling.values.items() if fields[name] is None}
    for line in footer(output, effective(defaults, params.temperature)):
        stderr.print(f"[dim]{line}[/dim]", soft_wrap=True)


def _answer(
    llm: "LLM", question: str, params: "SamplingParams", options: PromptOptions, shared: dict[str, Any]
) -> "RequestOutput":
    """Answer the question, as a chat if there is a system message; `shared` are arguments of `generate` and `chat`."""
    if options.system is None:
        return llm.generate(
            question,
            params,
            raw=options.raw,
            parse_special=options.parse_special,
            suffix=options.suffix,
            **shared,
        )[0]
    messages = [{"role": "system", "content": options.system}, {"role": "user", "content": question}]
    return llm.chat(messages, params, **shared)[0]


def _show(_: int, text: str) -> None:
    """Print text; control characters are removed on a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def effective(defaults: "Mapping[str, float]", temperature: float) -> "dict[str, float]":
    """Return the default parameters that have an effect: greedy decoding ignores truncation."""
    truncations = ("top_p", "top_k", "min_p") if temperature == 0 else ()
    return {name: value for name, value in defaults.items() if name not in truncations}


def footer(output: "RequestOutput", defaults: "Mapping[str, float]") -> list[str]:
    """Return lines with the answer's statistics and its seed; `defaults` are the model's that had an effect."""
    from foreword.cli.chat.text import Tally, summary_line
    from foreword.engine.outputs import sum_stats

    stats = sum_stats((answer.index, answer.stats) for answer in output.outputs if answer.stats is not None)
    # Answers run concurrently, so the rate is the request's, not one over the sum of the answers' times.
    statistics = summary_line(Tally.of(stats), output.timings.predicted_per_second or None)
    seed = f"seed {output.outputs[0].seed}"
    if defaults:
        listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        seed += f"; {listed}: the model's defaults"
    return [statistics, seed]
