"""Texts of a run for training and evaluation, with disjoint prompts."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import RequestError
from foreword.train.texts.documents import HELD_OUT_PERMILLE, Document, read_shards, write_shard
from foreword.train.texts.prompts import FilePrompt

HELD_OUT, FILES = "held out", "files"

Answer = Callable[[Sequence[FilePrompt]], list[Document]]
"""Returns the target's greedy answers to prompts."""


@dataclass(frozen=True)
class RunTexts:
    """Texts of one run."""

    trained: list[Document]
    measured: dict[str, list[Document]]  # by set: held-out texts of the target, prompts from files
    left_out: int  # texts omitted because their prompt is evaluated

    def summary(self) -> list[str]:
        """Return sentences for the card: training data and split."""
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
            f"{self.left_out} texts whose prompt is measured on were left out, too.",
        ]

    def check_tokens(self, vocab_size: int) -> None:
        """Raise `RequestError` for tokens that the target does not have."""
        for document in itertools.chain(self.trained, *self.measured.values()):
            if (largest := int(document.tokens.max())) >= vocab_size:
                raise RequestError(
                    f"the texts have token {largest} and the model's vocabulary ends at {vocab_size - 1}; "
                    "give texts that this model wrote"
                )


def gather_texts(
    directory: Path, evaluation: Sequence[FilePrompt], answer: Answer, most_held_out: int, target: str
) -> RunTexts:
    """Read the shards of a directory; answers to prompts from files are stored next to them for the next run.

    `target` is a unique name of the target.
    """
    documents = list(read_shards(directory))
    measured: dict[str, list[Document]] = {}
    held_out = [document for document in documents if document.held_out and document.temperature == 0]
    if held_out:
        measured[HELD_OUT] = held_out[:most_held_out]
    if evaluation:
        measured[FILES] = _answered(directory / "evaluation", evaluation, answer, target)
    secret = {document.prompt for document in measured.get(FILES, [])}
    rest = [document for document in documents if not document.held_out]
    trained = [document for document in rest if document.prompt not in secret]
    if not documents:
        raise RequestError(
            f"there are no training texts in {directory}; write some with `foreword train data`"
        )
    if not trained:
        raise RequestError(
            f"all {len(documents)} texts in {directory} are held out for evaluation; "
            "write more with `foreword train data`"
        )
    return RunTexts(trained, measured, len(rest) - len(trained))


def _answered(
    directory: Path, evaluation: Sequence[FilePrompt], answer: Answer, target: str
) -> list[Document]:
    key = hashlib.sha256(repr((target, evaluation)).encode()).hexdigest()[:16]
    place = directory / key
    if not any(place.glob("shard-*.safetensors")):
        write_shard(place, answer(evaluation))
    return list(read_shards(place))
