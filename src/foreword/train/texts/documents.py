"""Stores training texts in shards on disk, and selects the texts of a training run."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from foreword.errors import RequestError
from foreword.train.files import write_tensors
from foreword.train.texts.prompts import FilePrompt

HELD_OUT_PERMILLE = 10
_PATTERN = "shard-*.safetensors"
_MODEL = "model"  # metadata key of the identity of the writing model; missing in older shards


@dataclass(frozen=True)
class Document:
    """A conversation whose answers the target wrote."""

    tokens: NDArray[np.int32]
    is_answer: NDArray[np.bool_]  # per token
    kind: str  # chat, code, ..., or the category of a prompt from a file
    temperature: float  # of the last answer
    held_out: bool  # reserved for evaluation

    @property
    def answer_begin(self) -> int:
        """Index of the first answer's first token; at least 1."""
        return int(self.is_answer.argmax())

    @property
    def prompt(self) -> bytes:
        """Tokens before the first answer as bytes, a key that equal prompts share."""
        return self.tokens[: self.answer_begin].tobytes()


def make_document(
    tokens: Sequence[int], answers: Sequence[tuple[int, int]], kind: str, temperature: float
) -> Document:
    """Return a document; `answers` are token ranges (begin, end). The prompt decides whether it is held out."""
    is_answer = np.zeros(len(tokens), dtype=np.bool_)
    for begin, end in answers:
        is_answer[begin:end] = True
    prompt = tokens[: answers[0][0]]
    return Document(np.asarray(tokens, np.int32), is_answer, kind, temperature, is_held_out(prompt))


def prompt_digest(prompt: "Sequence[int] | NDArray[np.int32]") -> int:
    """Return a hash of a prompt that all machines share."""
    digest = hashlib.sha256(np.asarray(prompt, "<i4").tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def is_held_out(prompt: Sequence[int], permille: int = HELD_OUT_PERMILLE) -> bool:
    """Return whether texts with this prompt are held out for evaluation, by its hash."""
    return prompt_digest(prompt) % 1000 < permille


def write_shard(directory: Path, documents: Sequence[Document], model: str | None = None) -> Path:
    """Write the next shard atomically; `model` is the identity of the writing model."""
    numbers = [int(path.stem.removeprefix("shard-")) for path in directory.glob(_PATTERN)]
    path = directory / f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
    kinds = sorted({document.kind for document in documents})
    numbered = {kind: number for number, kind in enumerate(kinds)}
    tensors = {
        "tokens": np.concatenate([document.tokens for document in documents]),
        "is_answer": np.concatenate([document.is_answer for document in documents]),
        "lengths": np.array([len(document.tokens) for document in documents], np.int64),
        "kinds": np.array([numbered[document.kind] for document in documents], np.int32),
        "temperatures": np.array([document.temperature for document in documents], np.float32),
        "held_out": np.array([document.held_out for document in documents], np.bool_),
    }
    stored = {name: torch.from_numpy(array) for name, array in tensors.items()}
    written_by = {} if model is None else {_MODEL: model}
    write_tensors(path, stored, {"kinds": json.dumps(kinds)} | written_by)
    return path


def count_shards(directory: Path) -> int:
    return len(list(directory.glob(_PATTERN)))


def require_written_by(directory: Path, model: str) -> None:
    """Raise `RequestError` for shards of another model; a shard without an identity is accepted."""
    for path in sorted(directory.glob(_PATTERN)):
        with _shard_errors(path), safe_open(path, "numpy") as file:
            writer = file.metadata().get(_MODEL, model)
        if writer != model:
            raise RequestError(
                f"{path} was written by another model; give a directory of texts that this model wrote"
            )


def read_shards(directory: Path) -> Iterator[Document]:
    """Yield all documents in writing order."""
    for path in sorted(directory.glob(_PATTERN)):
        with _shard_errors(path):
            with safe_open(path, "numpy") as file:
                kinds = json.loads(file.metadata()["kinds"])
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            for number, end in enumerate(columns["lengths"].cumsum()):
                begin = end - columns["lengths"][number]
                yield Document(
                    columns["tokens"][begin:end],
                    columns["is_answer"][begin:end],
                    kinds[columns["kinds"][number]],
                    float(columns["temperatures"][number]),
                    bool(columns["held_out"][number]),
                )


@contextmanager
def _shard_errors(path: Path) -> Iterator[None]:
    """Turn errors of an unreadable shard into `RequestError`."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(f"{path} is not a valid shard of training texts ({error}); remove it") from None


HELD_OUT, FILES = "held out", "files"
"""Names of the evaluation sets: held-out texts, and answers to prompts from files."""

Answer = Callable[[Sequence[FilePrompt]], list[Document]]
"""A function that returns the target's greedy answers to prompts."""


@dataclass(frozen=True)
class RunTexts:
    """Texts for training and evaluation, with disjoint prompts."""

    trained: list[Document]
    measured: dict[str, list[Document]]  # texts of each evaluation set
    left_out: int  # number of texts left out because their prompt is evaluated

    def summary(self) -> list[str]:
        """Return sentences about the training data and its split for the model card."""
        tokens = sum(len(document.tokens) for document in self.trained)
        kinds: Counter[str] = Counter()
        for document in self.trained:
            kinds[document.kind] += int(document.is_answer.sum())
        shares = ", ".join(
            f"{kind} {count / max(kinds.total(), 1):.0%}" for kind, count in kinds.most_common()
        )
        return [
            f"{len(self.trained):,} texts of {tokens:,} tokens, {kinds.total():,} of them in answers, all written by "
            f"the model itself ({shares}).",
            f"Split by the SHA-256 of a text's prompt: {HELD_OUT_PERMILLE / 10:g}% is held out and never trained on; "
            f"{self.left_out} texts whose prompt is evaluated were left out, too.",
        ]

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `RequestError` for token ids outside the target's vocabulary."""
        for document in itertools.chain(self.trained, *self.measured.values()):
            if (largest := int(document.tokens.max())) >= vocab_size:
                raise RequestError(
                    f"the texts have token id {largest}, but the model's largest is {vocab_size - 1}; "
                    "give texts that this model wrote"
                )


def gather_texts(
    directory: Path, evaluation: Sequence[FilePrompt], answer: Answer, most_held_out: int, target: str
) -> RunTexts:
    """Read the texts of a run from a directory's shards, with answers to the evaluation prompts.

    Answers are stored in the directory, and generated only once for each `target`, a unique name of the target. Of the
    held-out texts, the greedy ones are measured; if there are none, the sampled ones.
    """
    documents = list(read_shards(directory))
    measured: dict[str, list[Document]] = {}
    held_out = [document for document in documents if document.held_out]
    greedy = [document for document in held_out if document.temperature == 0]
    if held_out:
        measured[HELD_OUT] = (greedy or held_out)[:most_held_out]
    if evaluation:
        measured[FILES] = _stored_answers(directory / "evaluation", evaluation, answer, target)
    evaluated = {document.prompt for document in measured.get(FILES, [])}
    candidates = [document for document in documents if not document.held_out]
    trained = [document for document in candidates if document.prompt not in evaluated]
    if not documents:
        raise RequestError(
            f"there are no training texts in {directory}; write some with `foreword train data`"
        )
    if not trained:
        raise RequestError(
            f"all {len(documents)} texts in {directory} are held out for evaluation; "
            "write more with `foreword train data`"
        )
    return RunTexts(trained, measured, len(candidates) - len(trained))


def _stored_answers(
    directory: Path, evaluation: Sequence[FilePrompt], answer: Answer, target: str
) -> list[Document]:
    """Return the answers stored for these prompts and this target, and generate them the first time."""
    key = hashlib.sha256(repr((target, evaluation)).encode()).hexdigest()[:16]
    folder = directory / key
    if not count_shards(folder):
        write_shard(folder, answer(evaluation))
    return list(read_shards(folder))
