"""Chains that a head's runner makes by itself, without coming back for every guess."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch import Tensor

from foreword.acceptance.request import RECORD, DraftSampling
from foreword.acceptance.rules.rule import Rule
from foreword.backends.interface import ChainPlan, Chains, ChainStop, PendingChains, Unsettled
from foreword.drafters.heads.vocabulary import DraftVocabulary
from foreword.drafters.model.next_level import has_fixed_corrections
from foreword.speculation.confidence import CLASSES, EDGES, Stop
from foreword.speculation.draft import DeviceTokens, Draft
from foreword.speculation.drafting import Ask, Unjudged

_EDGES = np.array(EDGES, np.float32)
_GOES_ON = (1.0,) * CLASSES


def plan_chains(
    asks: Sequence[Ask], rooms: Sequence[int], vocabulary: DraftVocabulary, stops: bool = False
) -> ChainPlan | None:
    """Guesses after every text, at most `rooms` of each; None if a draft must tell what it was drawn from.

    A runner that `stops` ends them where the asks say so.
    """
    samplings = [ask.request.sampling for ask in asks]
    if not all(is_drawn_alone(sampling) for sampling in samplings):
        return None
    steps = [min(ask.max_nodes, ask.max_depth, room) for ask, room in zip(asks, rooms, strict=True)]
    has_stop = stops and any(ask.stop is not None for ask in asks)
    return ChainPlan(
        np.array([len(ask.request.tokens) for ask in asks], np.int32),
        np.array(steps, np.int32),
        np.frombuffer(b"".join([sampling.record_bytes for sampling in samplings]), RECORD),
        vocabulary.token_ids,
        vocabulary.vocab_size,
        stop=_stop_of(tuple([ask.stop for ask in asks]), max(steps)) if has_stop else None,
    )


# It stays the same from one look at the estimates to the next.
@lru_cache(maxsize=256)
def _stop_of(stops: tuple[Stop | None, ...], most: int) -> ChainStop:
    """Where the chains of asks with these end."""
    rates = np.array([_GOES_ON if stop is None else stop.rates for stop in stops], np.float32)
    least = np.zeros((len(stops), most), np.float32)
    for row, stop in zip(least, stops, strict=True):
        told = () if stop is None else stop.least[:most]
        row[: len(told)] = told
    return ChainStop(_EDGES, rates, least)


def unsettled(plan: ChainPlan, unjudged: Sequence[Unjudged], drawn: Tensor) -> ChainPlan:
    """The same for texts that a pass under way makes longer, by one token at least; their guesses are of one source."""
    most = max([len(one.draft) for one in unjudged])
    places = [(*one.tokens.places, *[-1] * (most - len(one.draft))) for one in unjudged]
    ends = [0 if one.ask.pages is None else one.ask.pages.kv.reserved for one in unjudged]
    judged = Unsettled(
        drawn,
        np.array([one.drawn_at for one in unjudged], np.int32),
        unjudged[0].tokens.source.on_device,
        np.array(places, np.int32),
        np.array(ends, np.int32),
    )
    return replace(plan, lengths=plan.lengths + 1, unsettled=judged)


def drafted(asks: Sequence[Ask], guesses: Chains) -> list[Draft]:
    """The guesses after each text as its draft."""
    if isinstance(guesses, PendingChains):
        source = guesses.tokens
        return [
            Draft.on_device(DeviceTokens(source, tuple(places)), len(ask.request.tokens), ask.request.epoch)
            for ask, places in zip(asks, guesses.places, strict=True)
        ]
    told = guesses.confidence or [()] * len(asks)
    return [
        Draft.chain(tokens, len(ask.request.tokens), ask.request.epoch, confidence=confidence)
        for ask, tokens, confidence in zip(asks, guesses.tokens, told, strict=True)
    ]


def is_drawn_alone(sampling: DraftSampling) -> bool:
    """Whether a guess needs nothing but the head's logits, and tells nothing but its token."""
    is_told = sampling.rule is not Rule.COUPLED and sampling.record["temperature"] > 0
    return not is_told and not has_fixed_corrections(sampling)
