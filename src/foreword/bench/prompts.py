"""Prompts for benchmarks: the shipped ones, a file of JSON lines, or long documents cut to a number of tokens."""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from foreword.bench.skeleton import check_least
from foreword.errors import RequestError


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt and its category."""

    name: str  # id or line number in the file
    category: str
    text: str

    @property
    def key(self) -> str:
        """Unique key of the prompt, also across files."""
        return f"{self.name}-{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"


def own_prompts() -> list[BenchPrompt]:
    """Return the prompts shipped with the package."""
    resource = files("foreword.bench") / "data" / "prompts.jsonl"
    return parse_prompts(resource.read_text(encoding="utf-8"), "the package's own prompts")


def bench_prompts(paths: Sequence[Path] | None, limit: int | None) -> list[BenchPrompt]:
    """Return the first `limit` prompts of every category of these files; without files, of the shipped prompts.

    If several files have a category of the same name, the file's name is added to it: GSM8K's "math" is not
    Spec-Bench's.
    """
    if not paths:
        return take_per_category(own_prompts(), limit)
    read = [(path, take_per_category(read_prompts(path), limit)) for path in paths]
    files_with: Counter[str] = Counter()  # category -> number of files
    for _, prompts in read:
        files_with.update({prompt.category for prompt in prompts})
    renamed: list[BenchPrompt] = []
    for path, prompts in read:
        for prompt in prompts:
            is_shared = files_with[prompt.category] > 1
            category = f"{prompt.category} ({path.stem})" if is_shared else prompt.category
            renamed.append(replace(prompt, category=category))
    _refuse_duplicates(renamed, "the datasets")
    return renamed


_ENDINGS = {
    "question": "\n\nQuestion: what does the text above explain? Answer in detail, with names and values from it.",
    "continuation": "\n\nContinue the text above from where it ends.",
}
# An upper limit of any tokenizer's average on text. It bounds how much is tokenized to find where to cut.
_CHARACTERS_PER_TOKEN = 8


def long_documents() -> dict[str, str]:
    """Return texts by name: the package's source and, in a checkout, the project's documentation."""
    package = Path(__file__).parents[1]
    paths = {"docs": package.parents[1].glob("docs/*.md"), "source": package.rglob("*.py")}
    texts = {
        name: "\n".join(path.read_text(encoding="utf-8") for path in sorted(of_text))
        for name, of_text in paths.items()
    }
    return {name: text for name, text in texts.items() if text}


def document_prompts(
    lengths: Sequence[int], documents: Mapping[str, str], encode: Callable[[str], Sequence[int]]
) -> list[BenchPrompt]:
    """Return prompts of these lengths in tokens: the beginning of each document, followed by each of `_ENDINGS`.

    The category is the length. A document that is shorter than a length has no prompt of that length.
    """
    prompts = []
    for length in dict.fromkeys(lengths):
        of_length = [
            BenchPrompt(f"{name}, {ending}", f"{length} tokens", text)
            for ending, task in _ENDINGS.items()
            for name, document in documents.items()
            if (text := _cut(document, task, length, encode)) is not None
        ]
        if not of_length:
            raise RequestError(f"--context {length} is longer than every document")
        prompts += of_length
    return prompts


def _cut(document: str, task: str, length: int, encode: Callable[[str], Sequence[int]]) -> str | None:
    """Return the document's beginning and the task, together `length` tokens; None if the document is too short."""
    text = document[: length * _CHARACTERS_PER_TOKEN]

    def tokens_until(end: int) -> int:
        return len(encode(text[:end] + task))

    # The last cut that has no more than `length` tokens.
    end = bisect_right(range(len(text) + 1), length, key=tokens_until) - 1
    if end < 1:
        raise RequestError(f"--context {length} has no room for a document before its question")
    return None if end == len(text) else text[:end] + task


MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
"""Categories of MT-Bench. Spec-Bench counts them as one, conversation."""


def spec_bench_kinds(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Return Spec-Bench's prompts with the categories that it reports; prompts of other benchmarks are unchanged."""
    if not MT_BENCH.issubset(prompt.category for prompt in prompts):
        return list(prompts)  # from another benchmark
    return [replace(one, category="conversation") if one.category in MT_BENCH else one for one in prompts]


def prompts_digest(prompts: Sequence[BenchPrompt]) -> str:
    """Return a digest of the prompts, of their categories and of their order."""
    listed = "\n".join(f"{prompt.category} {prompt.key}" for prompt in prompts)
    return hashlib.sha256(listed.encode()).hexdigest()[:12]


def read_prompts(path: Path) -> list[BenchPrompt]:
    """Read prompts from JSON lines in any format of `parse_prompts`."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"dataset {path} cannot be read as text: {reason}") from None
    return parse_prompts(text, str(path))


def parse_prompts(text: str, source: str) -> list[BenchPrompt]:
    """Parse one prompt per non-blank line; the error for an invalid line has its number and the `source`."""
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_parse_line(line, number))
        except (ValueError, RecursionError) as error:
            why = "JSON that is too deep" if isinstance(error, RecursionError) else error
            raise RequestError(f"{source}, line {number}: {why}") from None
    if not prompts:
        raise RequestError(f"{source}: there are no prompts in it")
    _refuse_duplicates(prompts, source)
    return prompts


def _refuse_duplicates(prompts: Sequence[BenchPrompt], source: str) -> None:
    twice = [key for key, times in Counter(prompt.key for prompt in prompts).items() if times > 1]
    if twice:
        raise RequestError(f"{source}: prompt {twice[0].rpartition('-')[0]} is there twice")


def take_per_category(prompts: Sequence[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """Return the first `limit` prompts of every category, in file order; None: all."""
    if limit is None:
        return list(prompts)
    check_least(1, limit_per_category=limit)
    counts: Counter[str] = Counter()  # prompts seen, by category
    taken = []
    for prompt in prompts:
        counts[prompt.category] += 1
        if counts[prompt.category] <= limit:
            taken.append(prompt)
    return taken


def _parse_line(line: str, number: int) -> BenchPrompt:
    """Return the prompt of a line; raise `ValueError` if it has none."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if "turns" in value:  # Spec-Bench and the shipped prompts; only the first turn is used
        turns = value["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError("turns must be a list of at least one text")
        name = str(value.get("question_id", number))
        return BenchPrompt(name, _text("category", value.get("category")), _text("turns", turns[0]))
    if "prompt" in value:  # HumanEval
        return BenchPrompt(str(value.get("task_id", number)), "code", _text("prompt", value["prompt"]))
    if "question" in value:  # GSM8K
        return BenchPrompt(str(number), "math", _text("question", value["question"]))
    raise ValueError("no prompt: a line has turns (and category), or prompt, or question")


def _text(key: str, value: object) -> str:
    """Return the value of a field; raise `ValueError` if it is not a text, or blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be a text that is not empty")
    return value
