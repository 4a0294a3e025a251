"""Compares the next-token distributions of weight formats with those of float32."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.bench.skeleton import InTable
from foreword.errors import RequestError
from foreword.progress import Progress
from foreword.proofs.passes import prompt_pass

WINDOW = 512  # context length into which the text is cut


@dataclass(frozen=True)
class Quality:
    """Difference of one weight format from float32."""

    form: Annotated[str, InTable("form")]
    tokens: int
    mean_kl: Annotated[float, InTable("mean KL (nats)", ".5f")]  # from the distribution of float32
    # Positions with the same most likely token.
    top1_agreement: Annotated[float, InTable("top-1 agreement", ".2%")]


def read_text(path: Path) -> str:
    """Return the text of a file, or all strings of a .jsonl file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix != ".jsonl":
            return text
        return "\n\n".join(_strings(json.loads(line)) for line in text.split("\n") if line.strip())
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise RequestError(f"{path} cannot be read: {error}; give a text file") from error


def _strings(value: object) -> str:
    """Return all strings in a JSON value, one per line; keys do not count."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    return "\n".join(filter(None, map(_strings, value))) if isinstance(value, list) else ""


def measure_quality(
    reference: Decoder, forms: Mapping[str, Callable[[], Decoder]], tokens: Sequence[int], progress: Progress
) -> list[Quality]:
    """Return KL and agreement of every format, computed over windows of the text; `forms` has a loader per format."""
    windows = [list(tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)]
    decoders = {name: load() for name, load in forms.items()}
    sums = {name: [0.0, 0.0] for name in forms}  # over all positions: KL, and agreements
    for index, window in enumerate(windows):
        expected = log_probabilities(reference, window)
        for name, decoder in decoders.items():
            ours = log_probabilities(decoder, window)
            sums[name][0] += float((expected.exp() * (expected - ours)).sum())
            sums[name][1] += float((expected.argmax(-1) == ours.argmax(-1)).sum())
        progress(index + 1, len(windows))
    count = len(tokens)
    return [Quality(name, count, kl / count, agreed / count) for name, (kl, agreed) in sums.items()]


@torch.inference_mode()
def log_probabilities(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Return the next-token log-probabilities after every token of a text, float32 [tokens, vocab]."""
    with prompt_pass(decoder, tokens) as (runner, batch):
        rows = torch.arange(len(tokens), dtype=torch.int32)
        return runner.forward(replace(batch, logit_rows=rows)).logits.log_softmax(-1)
