"""Compares next-token distributions, of weight formats with float32 and of a draft model with its target."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.errors import RequestError
from foreword.proofs.passes import prompt_pass

WINDOW = 512
"""Context length into which the text is cut."""


@dataclass(frozen=True)
class Quality:
    """Difference of one weight format from float32."""

    form: str
    tokens: int
    mean_kl: float  # nats, from the distribution of float32
    top1_agreement: float  # fraction of positions with the same most likely token


def read_text(path: Path) -> str:
    """Return the text of a file, or all strings of a .jsonl file."""
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
    """Return KL and agreement of every format, computed over windows of the text."""
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
    """Return the next-token log-probabilities after every token of a text, float32 [tokens, vocab]."""
    with prompt_pass(decoder, tokens) as (runner, batch):
        rows = torch.arange(len(tokens), dtype=torch.int32)
        return runner.forward(replace(batch, logit_rows=rows)).logits.log_softmax(-1)


@dataclass(frozen=True)
class Divergence:
    """Means over positions. p is the target's distribution at a temperature, q that of the draft model."""

    places: int  # number of positions
    tv: float  # total variation, ½ Σ |p − q|
    kl: float | None  # KL(p || q) in nats; None at temperature 0, where it may be infinite
    same_top: float  # fraction of positions with the same most likely token
    token: float  # acceptance by *token*, and of the first token by *block*: 1 − TV
    coupled: float  # acceptance by *coupled*, with shared noise
    chosen: float  # acceptance of the draft model's most likely token


def distributions(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities, float64 [positions, vocab]; at temperature 0, 1 for the most likely token."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def divergence(target: Tensor, draft: Tensor, temperature: float) -> Divergence:
    """Compare the logits [positions, vocab] of both models on the same texts."""
    p, q = distributions(target, temperature), distributions(draft, temperature)
    tv = (p - q).abs().sum(-1) / 2
    kl = None if temperature == 0 else float((p * (p.log() - q.log())).nansum(-1).clamp(min=0).mean())
    chosen = p.gather(-1, q.argmax(-1, keepdim=True))
    return Divergence(
        places=len(p),
        tv=float(tv.mean()),
        kl=kl,
        same_top=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        token=float((1 - tv).mean()),
        coupled=float(coupled_agreement(p, q).mean()),
        chosen=float(chosen.mean()),
    )


def coupled_agreement(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that argmax(log p + G) = argmax(log q + G) for shared Gumbel noise G, [positions].

    Token v wins both with probability 1 / Σ_u max(p_u / p_v, q_u / q_v). The maximum depends on whether p_u / q_u
    exceeds p_v / q_v. Sorted by that ratio, the sum consists of a suffix of p and a prefix of q.
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_until = q.cumsum(-1)
    p_after = (p.sum(-1, keepdim=True) - p.cumsum(-1)).clamp(min=0)
    both = (p > 0) & (q > 0)
    return torch.where(both, 1 / (p_after / p + q_until / q), 0.0).sum(-1)


def combined(parts: Sequence[Divergence]) -> Divergence:
    """Return the means over all positions of several texts; None stays None."""
    places, *columns = zip(*map(astuple, parts), strict=True)
    whole = sum(places)
    means: list[Any] = [
        None if None in column else sum(map(mul, column, places)) / whole for column in columns
    ]
    return Divergence(whole, *means)
