"""Many texts of a Markov pair, through engine and step, and whether they follow the target's law."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.control.fixed import FixedPolicy
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.model.vocabularies import SharedTokens
from foreword.engine.requests.request import Request
from foreword.speculation.drafting import Drafter
from helpers.engines import ask, core_on, run
from helpers.markov_pair import TEMPERATURE, VOCAB, MarkovDecoder, next_token_law, peaked_logits
from helpers.text_statistics import TextStatistics

PROMPT = (0, 1)
LENGTH, CHAIN = 4, 3
SAMPLES, MANY = 2_000, 5_000
"""Texts; so many that a q shows which is a little too flat, or a tree that was cut by what was drawn."""

TARGET = peaked_logits(seed=1)
OTHER = TARGET + np.random.default_rng(2).normal(0.0, 0.6, TARGET.shape)


@dataclass(frozen=True)
class Found:
    """Answers to one prompt with so many seeds."""

    requests: list[Request]

    @property
    def texts(self) -> list[tuple[int, ...]]:
        return [tuple(request.output_ids) for request in self.requests]

    def guesses(self, what: str) -> list[int]:
        """[levels], how many were drafted, accepted or first rejected."""
        levels = [getattr(request.acceptance, f"{what}_per_position") for request in self.requests]
        return [sum(counts) for counts in zip_longest(*levels, fillvalue=0)]


def model_drafter(
    logits: np.ndarray, width: int = 1, shared: SharedTokens | None = None
) -> AutoregressiveDrafter:
    decoder: Decoder = MarkovDecoder(logits)  # type: ignore[assignment]
    return AutoregressiveDrafter(decoder, VOCAB, DraftingSize(width, rows_per_pass=4096), shared=shared)


def other_ids(logits: np.ndarray, pairs: dict[int, int], width: int = 1) -> AutoregressiveDrafter:
    """A drafter whose id `pairs[t]` is the target's token t, with the logits of `logits` in the target's ids.

    Target tokens that are not in `pairs` do not exist for it; it reads its id 0 in their place.
    """
    ours = [next((t for t, own in pairs.items() if own == d), 0) for d in range(VOCAB)]
    to_draft = torch.tensor([pairs.get(token, 0) for token in range(VOCAB)], dtype=torch.int32)
    vocabulary = DraftVocabulary(torch.tensor(list(pairs)), VOCAB, torch.device("cpu"))
    shared = SharedTokens(torch.tensor(list(pairs.values())), vocabulary, to_draft)
    return model_drafter(logits[np.ix_(ours, ours, ours)], width, shared)


def answers(
    rule: str,
    drafter: Drafter | None,
    samples: int,
    words: Sequence[Sequence[int]] = (),
    chain: int = CHAIN,
) -> Found:
    """So many texts, with seeds of their own, through engine and step."""
    target: Decoder = MarkovDecoder(TARGET)  # type: ignore[assignment]
    policy = FixedPolicy(drafter, chain)
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 4096}  # room for everyone's whole chain
    core = core_on(target, policy=policy, words=words, acceptance_rule=rule, **sizes)
    params = {"temperature": TEMPERATURE, "max_tokens": LENGTH, "ignore_eos": True}
    requests = [ask(core, PROMPT, SamplingParams(seed=seed, **params)) for seed in range(samples)]
    run(core)
    assert not core.faults
    return Found(requests)


@cache
def expected(samples: int = SAMPLES) -> TextStatistics:
    law = next_token_law(MarkovDecoder(TARGET), TEMPERATURE)
    return TextStatistics(law, PROMPT, LENGTH, samples)


def check_law(texts: Sequence[tuple[int, ...]]) -> None:
    test = expected(len(texts))
    found = test.statistics(test.counts(texts))
    assert (found <= test.thresholds).all(), (found, test.thresholds)
