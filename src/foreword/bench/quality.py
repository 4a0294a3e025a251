"""Compares next-token distributions: CPU kernels against float32, a draft model against its target."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from foreword.backends.interface import Decoder
from foreword.errors import RequestError
from foreword.proofs.passes import prompt_pass

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
    with prompt_pass(decoder, tokens) as (runner, batch):
        rows = torch.arange(len(tokens), dtype=torch.int32)
        return runner.forward(replace(batch, logit_rows=rows)).logits.log_softmax(-1)


@dataclass(frozen=True)
class Divergence:
    """Means over places of a text; p is the target's law at a temperature, q the draft's."""

    places: int
    tv: float  # total variation, ½ Σ |p − q|
    kl: float | None  # nats of p from q; None at temperature 0, where laws that differ are infinitely far
    same_top: float  # share of places with the same likeliest token
    token: float  # accepted by *token* (and first of *block*): 1 − TV
    coupled: float  # accepted by *coupled* if both draw with the same noise
    chosen: float  # accepted if the draft is its likeliest token


def laws(logits: Tensor, temperature: float) -> Tensor:
    """float64 [places, vocab], probabilities; at temperature 0 all of it is on the likeliest token."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def divergence(target: Tensor, draft: Tensor, temperature: float) -> Divergence:
    """Of two [places, vocab] logits for the same texts."""
    p, q = laws(target, temperature), laws(draft, temperature)
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
    """[places], the chance that argmax(log p + G) = argmax(log q + G) for one Gumbel noise G.

    Token v wins both races with chance 1 / Σ_u max(p_u / p_v, q_u / q_v). Which of the two is larger depends on whether
    p_u / q_u is above p_v / q_v: sorted by that ratio, the sum is a suffix of p and a prefix of q.
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_until = q.cumsum(-1)
    p_after = (p.sum(-1, keepdim=True) - p.cumsum(-1)).clamp(min=0)
    both = (p > 0) & (q > 0)
    return torch.where(both, 1 / (p_after / p + q_until / q), 0.0).sum(-1)


def combined(parts: Sequence[Divergence]) -> Divergence:
    """Means over all places of several texts."""
    places = sum(part.places for part in parts)
    means = {}
    for name in [field.name for field in fields(Divergence) if field.name != "places"]:
        values = [getattr(part, name) for part in parts]
        known = None not in values
        means[name] = (
            sum(v * part.places for v, part in zip(values, parts, strict=True)) / places if known else None
        )
    return Divergence(places, **means)  # type: ignore[arg-type]
