"""A smaller model with the same tokenizer writes ahead."""

from dataclasses import dataclass
from pathlib import Path

from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.models.sources.resolve import resolve_model


@dataclass(frozen=True)
class DraftModelConfig:
    """Which model drafts."""

    model: str  # a built-in name, a local path or a hub id
    tree_width: int = 1  # nodes on every level of the draft; 1 is a chain


def build_draft_model(config: DraftModelConfig, resources: DrafterResources) -> AutoregressiveDrafter:
    """Load the draft model beside the target; its tokens must mean the same."""
    checkpoint = open_checkpoint(Path(resolve_model(config.model)))
    check_same_vocabulary(resources.checkpoint, checkpoint)
    decoder = resources.load_decoder(checkpoint)
    size = DraftingSize(config.tree_width)
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes)


def build_on_node(
    config: DraftModelConfig, resources: DrafterResources, kv_tokens: int
) -> AutoregressiveDrafter:
    """Draft with the loaded model itself, in a KV cache of this many tokens."""
    size, decoder = DraftingSize(config.tree_width, kv_tokens), resources.target
    return AutoregressiveDrafter(decoder, resources.vocab_size, size, decoder.weight_bytes)


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a draft model whose token ids are not the target's. One of them may have some more at the end."""
    ours, theirs = target.tokenizer(), draft.tokenizer()
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if ours.token_bytes(token, skip_special_tokens=False) != theirs.token_bytes(
            token, skip_special_tokens=False
        ):
            raise RequestError(
                f"token {token} of draft model {draft.path} is not the target's token {token}; "
                "use a draft model with the target's tokenizer"
            )


KIND = DrafterKind(
    "a smaller model with the same tokenizer",
    DraftModelConfig,
    build_draft_model,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=AutoregressiveDrafter.traits,
    build_on_node=build_on_node,
)
