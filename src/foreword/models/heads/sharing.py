"""What a head and its target have in common."""

import torch

from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.opening import Head


def without_copies(head: Head, target: Checkpoint) -> Head:
    """Many files hold a copy of the target's embedding and output matrix: these are not loaded twice."""
    whole = head.spec.vocab_size == head.spec.draft_vocab_size and head.token_ids is None
    theirs = {"embed_tokens.weight": "model.embed_tokens.weight"}
    if whole:
        tied = "lm_head.weight" not in target.tensor_names()
        theirs["lm_head.weight"] = "model.embed_tokens.weight" if tied else "lm_head.weight"
    copies = [own for own, name in theirs.items() if head.spec.has(own) and _is_copy(head, own, target, name)]
    return head.without(copies) if copies else head


def _is_copy(head: Head, own: str, target: Checkpoint, name: str) -> bool:
    stored = head.files.stored(own)
    if not stored.dtype.is_floating_point or head.spec.hidden_size != head.spec.target_hidden_size:
        return False
    return torch.equal(stored, target.load(name, stored.dtype))
