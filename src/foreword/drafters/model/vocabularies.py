"""Translation between the target's tokens and those of a draft model with another tokenizer.

The draft model samples only tokens that both vocabularies have. Before sampling, its logits are moved to the target's
ids. Therefore noise, filters and the recorded distribution q refer to target tokens, under every acceptance rule.
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

    columns: Tensor  # int64 [shared tokens], the draft model's ids
    vocabulary: DraftVocabulary  # moves the shared columns to the target's ids
    to_draft: Tensor  # int32 [target ids], on the host

    def to_draft_ids(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with draft ids instead of the target's; negative ids are references to `drawn_before`."""
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
    target_tokenizer, draft_tokenizer = target.tokenizer(), draft.tokenizer()
    if is_same_vocabulary(target_tokenizer, draft_tokenizer):
        return None
    draft_ids = _ids_by_content(draft_tokenizer)
    pairs = [  # (target id, draft id)
        (target_id, draft_ids[content])
        for content, target_id in _ids_by_content(target_tokenizer).items()
        if target_id < vocab_size and content in draft_ids
    ]
    if not pairs:
        raise RequestError(
            f"draft model {draft.path} has no token in common with the target; use another model"
        )
    pairs += _unpaired_eos(target_tokenizer, draft_tokenizer, pairs, vocab_size)
    columns = torch.tensor([draft_id for _, draft_id in pairs], device=device)
    vocabulary = DraftVocabulary(torch.tensor([target_id for target_id, _ in pairs]), vocab_size, device)
    to_draft = _draft_ids(target_tokenizer, draft_tokenizer, dict(pairs), vocab_size)
    return SharedTokens(columns, vocabulary, to_draft)


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
    """Return ids by the bytes of text tokens and the names of control tokens; of equal tokens, the first id."""
    control_names = {token: name for name, token in tokenizer.control_tokens.items()}
    ids: dict[bytes | str, int] = {}
    for token in range(tokenizer.vocab_size):
        content = control_names.get(token) or tokenizer.token_bytes(token)
        if content:
            ids.setdefault(content, token)
    return ids


def _unpaired_eos(
    target: Tokenizer, draft: Tokenizer, pairs: list[tuple[int, int]], vocab_size: int
) -> list[tuple[int, int]]:
    """Pair end-of-sequence tokens whose names differ, so that the draft model can propose the end of an answer."""
    target_paired = {target_id for target_id, _ in pairs}
    draft_paired = {draft_id for _, draft_id in pairs}
    target_eos = sorted(token for token in target.eos_ids - target_paired if token < vocab_size)
    draft_eos = sorted(draft.eos_ids - draft_paired)
    return list(zip(target_eos, draft_eos, strict=False))  # one side may have more


def _draft_ids(target: Tokenizer, draft: Tokenizer, paired: Mapping[int, int], vocab_size: int) -> Tensor:
    """Return a draft token for every id of the target, int32 [target ids].

    It is the same token or, without one, the last draft token of the target token's text.
    """
    unpaired = [token for token in range(vocab_size) if token not in paired]
    texts = [
        target.token_bytes(token, skip_special_tokens=False).decode("utf-8", errors="replace")
        for token in unpaired
    ]
    draft_ids = torch.full((vocab_size,), min(draft.eos_ids, default=0), dtype=torch.int32)
    for token, ids in zip(unpaired, draft.encode_many(texts), strict=True):
        if ids:
            draft_ids[token] = ids[-1]
    draft_ids[list(paired)] = torch.tensor(list(paired.values()), dtype=torch.int32)
    return draft_ids
