"""Measures tokens per pass of heads on the same prompts, and whether texts are the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from foreword.acceptance.params import SamplingParams
from foreword.bench.skeleton import InTable, ratio, staged
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.progress import StageProgress

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class HeadRow:
    """Tokens per pass on the held-out prompts of one kind; every draft has the same depth."""

    kind: Annotated[str, InTable("held-out prompts")]
    answers: Annotated[int, InTable("answers")]
    static: Annotated[float, InTable("τ static head", ".2f")]
    learned: Annotated[float, InTable("τ learned head", ".2f")]
    ratio: Annotated[float, InTable("ratio", ".2f")]
    same_texts: Annotated[int, InTable("same texts")]  # answers that both heads and plain decoding give


def measure_heads(
    engine: EngineCore,
    encode: Encode,
    held_out: Mapping[str, Sequence[str]],
    static: SpeculationConfig | None,
    learned: SpeculationConfig,
    params: SamplingParams,
    progress: StageProgress,
) -> list[HeadRow]:
    """Return a row per kind of prompts; the engine's pages must have room for both heads. `static` None: no head."""
    rows = []
    for kind in staged(held_out, progress, lambda kind: f"measuring {kind}"):
        plain, before, after = (
            [answered(engine, encode(prompt), params, head) for prompt in held_out[kind]]
            for head in (None, static, learned)
        )
        answers = [
            tuple(tuple(request.output_ids) for request in arms)
            for arms in zip(plain, before, after, strict=True)
        ]
        taus = [tokens_per_pass(requests) for requests in (before, after)]
        same = sum(len(set(texts)) == 1 for texts in answers)
        rows.append(HeadRow(kind, len(answers), taus[0], taus[1], ratio(taus[1], taus[0]), same))
    return rows


def answered(
    engine: EngineCore, prompt: Sequence[int], params: SamplingParams, head: SpeculationConfig | None
) -> Request:
    """Answer one prompt with this head drafting at every step; None: plain decoding. Return the ended request."""
    speculation = False if head is None else {**head.as_mapping(), "fixed": True}
    (request,) = engine.add(NewRequest("learn", tuple(prompt), params, speculation=speculation))
    while engine.has_requests:
        engine.step()
    return request


def tokens_per_pass(requests: Sequence[Request]) -> float:
    """Return the tokens per pass of decoding, without the passes over prompts."""
    counts = [request.accounting for request in requests]
    tokens = sum(len(request.output_ids) - request.accounting.first_tokens for request in requests)
    return ratio(tokens, sum(count.passes - count.first_passes for count in counts))
