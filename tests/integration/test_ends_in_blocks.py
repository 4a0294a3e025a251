"""Every way in which an answer can end, at every place inside accepted blocks of up to 8 tokens."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from foreword.speculation.drafting import DraftRequest
from helpers.byte_pieces import EOS, BytePieces
from helpers.end_cases import END_IDS, SCRIPT_LEN, VOCAB, EndCase
from helpers.scripted_target import PROMPT_LEN, ScriptDrafter, ScriptedTarget, prompt_of

BLOCK = 8
CONTEXT = 48
AT_ONCE = 500
ROOMS = (10, 16, 3, 8, 12, 1, 9, 2, 14)


@dataclass
class Answer:
    """What came out of an engine for one case."""

    request: Request
    deltas: list[AnswerDelta]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


class Blocks:
    """An engine on scripts, with or without a drafter that knows them."""

    def __init__(self, cases: list[EndCase], drafting: bool, seed: int = 0) -> None:
        self.cases = cases
        self.target = ScriptedTarget(
            np.stack([case.script for case in cases]),
            np.stack([case.second for case in cases]),
            VOCAB,
            CONTEXT,
        )
        drafter = ScriptDrafter(self._next_token, VOCAB, seed)
        config = EngineConfig(
            max_num_batched_tokens=AT_ONCE * 3 * BLOCK,
            max_num_seqs=AT_ONCE,
            max_model_len=cases[0].context_length,
            enable_prefix_caching=False,
        )
        policy = FixedPolicy(drafter, 3 * (BLOCK - 1), BLOCK - 1) if drafting else FixedPolicy()
        vocabulary = Vocabulary(VOCAB, END_IDS, BytePieces())  # type: ignore[arg-type]
        self.core = EngineCore(self.target, vocabulary, EngineParts(config, policy))  # type: ignore[arg-type]

    def _next_token(self, request: DraftRequest, place: int) -> int:
        script = sum(token * VOCAB**i for i, token in enumerate(request.tokens[:PROMPT_LEN]))
        return self.cases[script].token(min(place, SCRIPT_LEN - 1))

    def answers(self) -> list[Answer]:
        found = {}
        for number, case in enumerate(self.cases):
            name = str(number)
            (request,) = self.core.add(NewRequest(name, prompt_of(number, VOCAB), case.params))
            found[name] = Answer(request, [])
        rows = {}  # KV rows of every request before its pages were given back
        close = self.core.cache.close

        def closing(kv: object) -> None:
            rows[id(kv)] = kv.computed  # type: ignore[attr-defined]
            close(kv)  # type: ignore[arg-type]

        self.core.cache.close = closing  # type: ignore[method-assign]
        while self.core.has_requests:
            for delta in self.core.step():
                found[delta.request_id].deltas.append(delta)
        for answer in found.values():
            behind = len(answer.request.tokens) - rows[id(answer.request.kv)]
            assert 0 <= behind <= 1, "the KV rows are those of the tokens, but for the last one's"
        assert self.core.cache.available_pages == self.core.cache.pool.num_pages
        assert not self.core.faults
        return list(found.values())

    def logprobs(self, number: int, tokens: list[int]) -> list[float]:
        places = np.arange(len(tokens))
        scores = self.target.logits(np.full_like(places, number), places).log_softmax(dim=-1)
        return scores.numpy()[places, tokens].tolist()


def check(blocks: Blocks, number: int, answer: Answer) -> None:
    case, last = blocks.cases[number], answer.deltas[-1]
    expected = case.expected()
    found = (answer.tokens, answer.text, last.finish_reason, last.stop_reason)
    assert found == (expected.tokens, expected.text, expected.finish_reason, expected.stop_reason), case
    assert answer.request.output_ids == expected.tokens
    assert all(delta.finish_reason is None for delta in answer.deltas[:-1])
    scores = [entry for delta in answer.deltas for entry in delta.logprobs]
    if case.params.logprobs is None:
        assert scores == []
    else:
        assert [entry.token for entry in scores] == expected.tokens
        assert all(len(entry.top_ids) == case.params.logprobs for entry in scores)
        wanted = blocks.logprobs(number, expected.tokens)
        assert np.abs(np.subtract([entry.logprob for entry in scores], wanted)).max() < 1e-4
    sampler = answer.request.sampler
    assert sampler.record["generated"] == len(expected.tokens)
    assert sampler.record["length"] == PROMPT_LEN + len(expected.tokens)
    seen = {
        t: n for t, n in zip(sampler.seen.ids.tolist(), sampler.seen.generated.tolist(), strict=True) if n
    }
    assert seen == dict(Counter(expected.tokens))
    stats = last.stats
    assert stats is not None
    assert stats.output_tokens == len(expected.tokens)
    assert stats.accepted == sum(delta.from_draft for delta in answer.deltas)
    assert stats.rollback_tokens >= stats.drafted - stats.accepted  # and what lay beyond the end
    assert stats.rejected_kv_bytes == stats.rollback_tokens * blocks.target.kv_rows().bytes_per_row


def kind_of_end(case: EndCase, answer: Answer) -> str:
    last = answer.deltas[-1]
    if last.finish_reason == "length":
        return "max_tokens" if len(answer.tokens) == case.params.max_tokens else "context"
    return {type(None): "eos", int: "stop id", str: "stop text"}[type(last.stop_reason)]


def run_draws(draws: int, seed: int) -> Counter[tuple[str, int]]:
    """Plain and with drafts, all against the definition; counts (kind of end, tokens of the last block)."""
    rng = np.random.default_rng(seed)
    ends: Counter[tuple[str, int]] = Counter()
    for draw in range(draws):
        context = (CONTEXT, PROMPT_LEN + ROOMS[draw // 2 % len(ROOMS)])[draw % 2]
        cases = [EndCase.draw(rng, context) for _ in range(AT_ONCE)]
        for drafting in (False, True):
            blocks = Blocks(cases, drafting, seed=draw)
            for number, answer in enumerate(blocks.answers()):
                check(blocks, number, answer)
                if drafting:
                    ends[kind_of_end(cases[number], answer), len(answer.deltas[-1].token_ids)] += 1
    return ends


@pytest.mark.parametrize(
    ("draws", "cases"), [(4, 2_000), pytest.param(22, 10_000, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_every_end_at_every_place_of_a_block(draws: int, cases: int):
    ends = run_draws(draws, seed=draws)
    assert sum(ends.values()) >= cases
    for kind in ("eos", "stop id", "stop text", "max_tokens", "context"):
        assert {place for found, place in ends if found == kind} == set(range(1, BLOCK + 1)), kind


def one(script: list[int], **params: object) -> EndCase:
    """A case by hand: the script's rest is `x`."""
    x = 21
    row = np.array([*script, *[x] * (SCRIPT_LEN - len(script))])
    chosen = SamplingParams(temperature=0, frequency_penalty=0.01, **params)  # type: ignore[arg-type]
    return EndCase(row, np.full(SCRIPT_LEN, x), chosen, CONTEXT)


A, B, AB = 3, 4, 6
TOGETHER = {
    "EOS in the last token that is allowed": (one([A, B, EOS], max_tokens=3), "stop", None),
    "a stop id in the last token": (one([A, A, B], max_tokens=3, stop_token_ids=(B,)), "stop", B),
    "a stop text in the last token": (one([A, A, B], max_tokens=3, stop=("ab",)), "stop", "ab"),
    "a stop text one token too late": (one([A, A, A, B], max_tokens=3, stop=("ab",)), "length", None),
    "a stop id that is an end of the model": (one([A, EOS], stop_token_ids=(EOS,)), "stop", EOS),
    "an ignored end": (one([A, EOS], max_tokens=6, ignore_eos=True), "length", None),
    "an ignored end that is asked for": (
        one([A, EOS], max_tokens=6, ignore_eos=True, stop_token_ids=(EOS,)),
        "stop",
        EOS,
    ),
    "the first of two stop texts": (one([A, AB, B], stop=("abb", "aa")), "stop", "aa"),
    "a single token": (one([A, B], max_tokens=1), "length", None),
    "EOS at once": (one([EOS, A], max_tokens=1), "stop", None),
    "a stop text before min_tokens": (one([A, B, A, B], stop=("ab",), min_tokens=2), "stop", "ab"),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_ends_that_meet(name: str):
    case, finish_reason, stop_reason = TOGETHER[name]
    for context in (CONTEXT, PROMPT_LEN + len(case.expected().tokens)):
        case = replace(case, context_length=context)
        for drafting in (False, True):
            blocks = Blocks([case] * 8, drafting)
            for number, answer in enumerate(blocks.answers()):
                check(blocks, number, answer)
                last = answer.deltas[-1]
                assert (last.finish_reason, last.stop_reason) == (finish_reason, stop_reason)
