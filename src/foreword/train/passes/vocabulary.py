"""Draft vocabulary of a head: the most frequent tokens of answers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from foreword.train.texts.documents import Document


@dataclass(frozen=True)
class HeadVocabulary:
    """Mapping between a head's outputs and the target's tokens."""

    token_ids: Tensor  # int64 [draft], ascending
    draft_ids: Tensor  # int64 [target], -1 if not in the draft vocabulary
    coverage: float  # covered fraction of the answers' tokens

    @staticmethod
    def of(token_ids: Tensor, vocab_size: int, coverage: float) -> "HeadVocabulary":
        draft_ids = torch.full((vocab_size,), -1, dtype=torch.int64, device=token_ids.device)
        draft_ids[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return HeadVocabulary(token_ids, draft_ids, coverage)

    def to(self, device: torch.device) -> "HeadVocabulary":
        return HeadVocabulary(self.token_ids.to(device), self.draft_ids.to(device), self.coverage)

    @property
    def d2t(self) -> Tensor:
        """Target id minus draft id, as in head files."""
        return self.token_ids - torch.arange(len(self.token_ids), device=self.token_ids.device)


def whole_vocabulary(vocab_size: int) -> HeadVocabulary:
    """Return all of the target's tokens."""
    return HeadVocabulary.of(torch.arange(vocab_size), vocab_size, 1.0)


def vocabulary_tensors(vocabulary: HeadVocabulary) -> dict[str, Tensor]:
    """Return `d2t` and `t2d` of a head file; empty for the whole vocabulary."""
    if len(vocabulary.token_ids) == len(vocabulary.draft_ids):
        return {}
    return {"d2t": vocabulary.d2t.cpu(), "t2d": (vocabulary.draft_ids >= 0).cpu()}


def stored_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> HeadVocabulary:
    """Return the vocabulary of a head file."""
    if "token_map" in tensors:
        return HeadVocabulary.of(tensors["token_map"].long(), vocab_size, 1.0)
    if "d2t" in tensors:
        offsets = tensors["d2t"].long()
        return HeadVocabulary.of(offsets + torch.arange(len(offsets)), vocab_size, 1.0)
    return whole_vocabulary(vocab_size)


def choose_vocabulary(documents: Iterable[Document], size: int, vocab_size: int) -> HeadVocabulary:
    """Return the `size` most frequent tokens of all answers; unseen ones by id."""
    counts = np.zeros(vocab_size, np.int64)
    for some in _batched(documents, 4096):
        answers = np.concatenate([document.tokens[document.is_answer] for document in some])
        counts += np.bincount(answers, minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")[: min(size, vocab_size)]
    coverage = float(counts[order].sum() / max(counts.sum(), 1))
    return HeadVocabulary.of(torch.from_numpy(np.sort(order)), vocab_size, coverage)


def _batched(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    source = iter(documents)
    while some := list(islice(source, size)):
        yield some
