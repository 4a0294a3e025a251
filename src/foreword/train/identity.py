"""What tells one model from another, so that texts and states of one are not taken for those of another."""

import hashlib
import json

import torch

from foreword.models.formats.checkpoint import Checkpoint
from foreword.models.heads.shipped import NORMS, some_tokens


def identity_of(checkpoint: Checkpoint) -> str:
    """A digest of sizes, some tokens and some norms: the same whatever file the model comes in."""
    config, names = checkpoint.config, checkpoint.tensor_names()
    norms = [checkpoint.load(name, torch.float32).tolist() for name in NORMS if name in names]
    about = {
        "sizes": [config.hidden_size, config.num_layers, config.vocab_size],
        "tokens": some_tokens(checkpoint.tokenizer()),
        "norms": [[round(number, 5) for number in norm] for norm in norms],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
