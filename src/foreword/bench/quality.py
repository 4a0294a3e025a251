"""How far the CPU kernels' numbers are from float32, on text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.proofs.lone_request import lone_request
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction

WINDOW = 512
"""Tokens of context that the text is cut into."""


@dataclass(frozen=True)
class Quality:
    """How one form differs from float32."""

    form: str
    tokens: int
    mean_kl: float  # nats, of the form's next-token distribution from float32's
    top1_agreement: float  # share of positions with the same most probable token


def read_text(path: Path) -> str:
    """A text file, or a .jsonl file of which every string is taken."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file") from error
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join(_strings(json.loads(line)) for line in text.splitlines() if line.strip())


def _strings(value: object) -> str:
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(_strings, parts)))


def measure_quality(
    reference: Decoder,
    forms: Mapping[str, Callable[[], Decoder]],
    tokens: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """KL and agreement of every form, window by window; a form is loaded when its turn comes."""
    windows = [list(tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)]
    decoders = {name: load() for name, load in forms.items()}
    sums = {name: [0.0, 0.0] for name in forms}
    for index, window in enumerate(windows):
        expected = log_probabilities(reference, window)
        for name, decoder in decoders.items():
            ours = log_probabilities(decoder, window)
            sums[name][0] += float((expected.exp() * (expected - ours)).sum())
            sums[name][1] += float((expected.argmax(-1) == ours.argmax(-1)).sum())
        if progress is not None:
            progress(index + 1, len(windows))
    count = len(tokens)
    return [Quality(name, count, kl / count, agreed / count) for name, (kl, agreed) in sums.items()]


@torch.inference_mode()
def log_probabilities(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Next-token distributions after every token of a text by itself: float32 [tokens, vocab]."""
    cache = PagedCache(-(-len(tokens) // PAGE_SIZE))
    runner = ModelRunner.allocate(decoder, cache.pool.num_pages, PAGE_SIZE)
    request = lone_request(cache, tokens, decoder.config.vocab_size)
    with Transaction(cache, [PassEntry.of(request, len(tokens))]) as transaction:
        rows = torch.arange(len(tokens), dtype=torch.int32)
        batch = replace(transaction.batch([Draft()]), logit_rows=rows)
        return runner.forward(batch).logits.log_softmax(-1)
