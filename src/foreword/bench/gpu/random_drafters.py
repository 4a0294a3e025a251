"""Drafters with heads of the usual shapes and random weights: they cost what trained ones cost."""

from pathlib import Path

from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import TorchDecoder
from foreword.bench.drafters.random_heads import write_random_head
from foreword.drafters.heads.dflash import DFlashHead
from foreword.drafters.heads.dspark import DSparkHead
from foreword.drafters.heads.loading import LoadedHead, taps_of
from foreword.drafters.heads.medusa import MedusaDrafter
from foreword.drafters.heads.p_eagle import PEagleHead
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.kv.spec import RowSpec
from foreword.models.heads.opening import Head, open_head
from foreword.models.heads.spec import DRAFTERS_OWN
from foreword.speculation.drafting import Drafter

METHODS = ("eagle3", "p_eagle", "dflash", "dspark", "medusa")


def random_head(decoder: Decoder, method: str, path: Path) -> Head:
    """A head of this method, written to a new directory."""
    return open_head(write_random_head(method, decoder.config, path)).fitted(decoder.config)


def head_drafter(decoder: Decoder, head: Head, is_reference: bool = False) -> Drafter:
    """A drafter of chains; as a reference, the head of a torch decoder runs in plain torch, whatever its backend."""
    method, spec = head.spec.kind, head.spec
    vocabulary = DraftVocabulary(head.token_ids, decoder.config.vocab_size, decoder.device)
    plain = decoder if is_reference and isinstance(decoder, TorchDecoder) else None
    if method == "medusa":
        runner = decoder.medusa(head) if plain is None else TorchDecoder.medusa(plain, head)
        return MedusaDrafter(runner, taps_of(spec)[0], vocabulary, width=1)
    loaded = LoadedHead(
        decoder.head(head, method) if plain is None else TorchDecoder.head(plain, head, method),
        RowSpec(method, len(spec.layers), *spec.layers[0].attention.kept),
        taps_of(spec),
        vocabulary,
        {name: head.load(name).to(decoder.device) for name in DRAFTERS_OWN if spec.has(name)},
    )
    if method == "dspark":
        return DSparkHead(loaded, 1, confidence=0.0)
    if method == "dflash":
        return DFlashHead(loaded, 1)
    return (PEagleHead if method == "p_eagle" else StepwiseHead)(loaded, 1)
