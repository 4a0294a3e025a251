"""Medusa heads (Medusa, axolotl, vLLM): each drafts one position; none reads a token."""

import re

from foreword.errors import CheckpointError
from foreword.models.config import NormSpec, RopeSpec
from foreword.models.heads.files import HeadFiles, checked_shapes
from foreword.models.heads.spec import HeadSpec, Join

_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.")
_OWN = re.compile(r"^(blocks|lm_heads)\.\d+\.|^token_map$")


def medusa_files(files: HeadFiles) -> HeadFiles:
    """Return the heads' tensors, without the model in a Medusa-2 file."""
    return files.renamed({name: name for name in files.shapes if _OWN.match(name)})


def read_medusa(files: HeadFiles) -> HeadSpec:
    """Read the heads' description; heads are counted, since configs are often wrong."""
    present, fields = files.shapes, files.fields
    numbers = [(int(m[1]), int(m[2])) for name in present if (m := _BLOCK.match(name))]
    heads, blocks = 1 + max(head for head, _ in numbers), 1 + max(block for _, block in numbers)
    hidden = present["blocks.0.layers.0.weight"][0] if "blocks.0.layers.0.weight" in present else 0
    outputs = [shape[0] for name, shape in present.items() if name.startswith("lm_heads.")]
    tokens = outputs[0] if outputs else fields.count("vocab_size")
    # Heads over the whole vocabulary determine its size; otherwise the config must state it.
    vocab = fields.count("vocab_size") if "token_map" in present else tokens
    required: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {"token_map": (tokens,)}
    for head in range(heads):
        for block in range(blocks):
            required[f"blocks.{head}.layers.{block}.weight"] = (hidden, hidden)
            optional[f"blocks.{head}.layers.{block}.bias"] = (hidden,)
        if outputs:
            required[f"lm_heads.{head}.weight"] = (tokens, hidden)
    if "token_map" in present and not outputs:
        raise CheckpointError(f"{files.path} has a token_map and no lm_heads; get the head again")
    return HeadSpec(
        kind="medusa",
        hidden_size=hidden,
        layers=(),
        norm=NormSpec(1e-6),
        rope=RopeSpec(10000.0),
        vocab_size=vocab,
        draft_vocab_size=tokens,
        target_hidden_size=hidden,
        num_taps=1,
        boundaries=None,
        reads_normed=True,
        join=Join.NONE,
        shapes=checked_shapes(files, required, optional),
        num_heads=heads,
        blocks_per_head=blocks,
    )
