"""How far two next-token laws are from each other, and how often rules would accept a guess from one of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Means over places of a text; p is the target's law at a temperature, q the draft's."""

    places: int
    tv: float  # total variation, ½ Σ |p − q|
    kl: float | None  # nats of p from q; None at temperature 0, where laws that differ are infinitely far
    same_top: float  # share of places with the same likeliest token
    token: float  # accepted by *token* (and first of *block*): 1 − TV
    coupled: float  # accepted by *coupled* if both draw with the same noise
    chosen: float  # accepted if the draft guesses its likeliest token


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
    guessed = p.gather(-1, q.argmax(-1, keepdim=True))
    return Divergence(
        places=len(p),
        tv=float(tv.mean()),
        kl=kl,
        same_top=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        token=float((1 - tv).mean()),
        coupled=float(coupled_agreement(p, q).mean()),
        chosen=float(guessed.mean()),
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
