"""Translation between the target's tokens and those of a draft model with another tokenizer.

The draft model samples only among the tokens that both vocabularies have. Its logits are moved to the target's ids
first, so that noise, filters and the recorded distribution q are those of target tokens under every acceptance rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.backends.batch import ForwardBatch
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class SharedTokens:
    """Tokens with the same bytes in both vocabularies, and a draft token for every token of the target."""

    columns: Tensor  # int64 [shared], the draft model's ids
    vocabulary: DraftVocabulary  # moves the shared columns to the target's ids
    to_draft: Tensor  # int32 [target ids], on the host

    def to_draft_ids(self, batch: ForwardBatch) -> ForwardBatch:
        """Replace the target's ids in a batch; negative ids refer to `drawn_before` and stay."""
        ids = batch.token_ids
        translated = torch.where(ids < 0, ids, self.to_draft[ids.clamp(min=0).long()])
        drawn = batch.drawn_before
        if drawn is not None:
            drawn = self.to_draft.to(drawn.device)[drawn.clamp(min=0)].to(drawn.dtype)
        return replace(batch, token_ids=translated, drawn_before=drawn)

    def to_target(self, logits: Tensor) -> Tensor:
        """Reorder logits by target id, [rows, target ids]; a token without a draft id gets probability 0."""
        return self.vocabulary.spread(logits[:, self.columns])


def shared_tokens(
    target: Checkpoint, draft: Checkpoint, vocab_size: int, device: torch.device
) -> SharedTokens | None:
    """Return the translation between two vocabularies; None if their ids are the same.

    `vocab_size` ids of the target can be sampled. Raise `RequestError` if the vocabularies share no token.
    """
    ours, theirs = target.tokenizer(), draft.tokenizer()
    if is_same_vocabulary(ours, theirs):
        return None
    target_ids, draft_ids = _ids_by_content(ours), _ids_by_content(theirs)
    shared = {content: number for content, number in target_ids.items() if number < vocab_size}
    pairs = [(number, draft_ids[content]) for content, number in shared.items() if content in draft_ids]
    if not pairs:
        raise RequestError(
            f"draft model {draft.path} has no token in common with the target; use another model"
        )
    pairs += _ends(ours, theirs, pairs, vocab_size)
    matched = dict(pairs)
    device_columns = torch.tensor([draft_id for _, draft_id in pairs], device=device)
    vocabulary = DraftVocabulary(torch.tensor([number for number, _ in pairs]), vocab_size, device)
    return SharedTokens(device_columns, vocabulary, _to_draft(ours, theirs, matched, vocab_size))


def is_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> bool:
    """Return whether ids mean the same tokens; either side may have additional ids at the end."""
    return all(
        target.token_bytes(token, skip_special_tokens=False)
        == draft.token_bytes(token, skip_special_tokens=False)
        for token in range(min(target.vocab_size, draft.vocab_size))
    )


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise `RequestError` for a draft model with other token ids."""
    if not is_same_vocabulary(target.tokenizer(), draft.tokenizer()):
        raise RequestError(
            f"draft model {draft.path} has another tokenizer than the target; "
            "use a draft model with the target's tokenizer"
        )


def _ids_by_content(tokenizer: Tokenizer) -> Mapping[bytes | str, int]:
    """Return ids by a text token's bytes or a control token's name; the first id where several are equal."""
    control = {number: name for name, number in tokenizer.control_tokens.items()}
    ids: dict[bytes | str, int] = {}
    for number in range(tokenizer.vocab_size):
        content = control.get(number) or tokenizer.token_bytes(number)
        if content:
            ids.setdefault(content, number)
    return ids


def _ends(
    target: Tokenizer, draft: Tokenizer, pairs: list[tuple[int, int]], vocab_size: int
) -> list[tuple[int, int]]:
    """Pair end tokens whose names differ, so that the draft model can propose the end of an answer."""
    paired_target, paired_draft = ({pair[side] for pair in pairs} for side in (0, 1))
    ours = sorted(number for number in target.eos_ids - paired_target if number < vocab_size)
    return list(zip(ours, sorted(draft.eos_ids - paired_draft), strict=False))


def _to_draft(target: Tokenizer, draft: Tokenizer, matched: Mapping[int, int], vocab_size: int) -> Tensor:
    """Return a draft token for every id of the target: the same token, or the last one of its text."""
    unmatched = [number for number in range(vocab_size) if number not in matched]
    texts = [
        target.token_bytes(number, skip_special_tokens=False).decode("utf-8", errors="replace")
        for number in unmatched
    ]
    fallback = min(draft.eos_ids, default=0)
    translation = torch.full((vocab_size,), fallback, dtype=torch.int32)
    for number, ids in zip(unmatched, draft.encode_many(texts), strict=True):
        if ids:
            translation[number] = ids[-1]
    translation[list(matched)] = torch.tensor(list(matched.values()), dtype=torch.int32)
    return translation
