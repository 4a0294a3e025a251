from collections.abc import Sequence

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.engine.messages import DraftShown
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request, RequestIdentity
from foreword.engine.text import AnswerText
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from foreword.speculation.draft import Draft
from foreword.speculation.requests import Verdict
from helpers.byte_pieces import BytePieces

EOS = 2


def request(max_tokens: int, context: int = 100) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    sampler = RequestSampler(params, TokenLimits(50), [5, 6, 7], seed=0)
    return Request(0, [5, 6, 7], params, sampler, RequestLimits(context, frozenset({EOS})))


@pytest.mark.parametrize("place", range(5))
def test_an_answer_ends_at_the_eos_inside_a_block(place: int):
    block = [9] * 5
    block[place] = EOS
    r = request(max_tokens=50)
    assert r.count_kept(block) == place + 1
    r.commit(Verdict(tokens=tuple(block[: place + 1])))
    assert r.finish_reason == "stop"
    assert r.output_ids[-1] == EOS


@pytest.mark.parametrize("max_tokens", range(1, 6))
def test_an_answer_ends_at_max_tokens_inside_a_block(max_tokens: int):
    r = request(max_tokens)
    assert r.count_kept([9] * 5) == max_tokens
    r.commit(Verdict(tokens=tuple([9] * max_tokens)))
    assert r.finish_reason == "length"
    assert r.room == 0


def test_a_stop_beats_a_length_at_the_same_token():
    r = request(max_tokens=2)
    r.commit(Verdict(tokens=(9, EOS)))
    assert r.finish_reason == "stop"


def test_the_context_ends_an_answer():
    r = request(max_tokens=50, context=5)
    assert r.room == 2
    assert r.count_kept([9, 9, 9]) == 2


def test_committing_past_the_end_is_an_error():
    with pytest.raises(ValueError, match="ends after 1"):
        request(max_tokens=9).commit(Verdict(tokens=(EOS, 9)))


def test_a_commit_that_fails_in_the_text_leaves_no_token_behind():
    class Unreadable:
        watches = False

        def push_all(self, tokens: Sequence[int]) -> str:
            raise UnicodeError("no such token")

        def state(self) -> None:
            """There is none."""

        def go_back(self, state: None) -> None:
            """As it was."""

        def finish(self) -> str:
            return ""

    r = request(max_tokens=5)
    r.answer._text = Unreadable()
    with pytest.raises(UnicodeError):
        r.commit(Verdict(tokens=(9, 8)))
    r.fail("it failed")
    delta = r.take_delta()
    assert (delta.token_ids, delta.stats.output_tokens, r.output_ids) == ((), 0, [])
    assert int(r.sampler.record["generated"]) == 0


def test_a_commit_that_fails_in_the_sampler_leaves_no_text_behind():
    class Refusing(RequestSampler):
        def commit(self, tokens: Sequence[int]) -> None:
            if len(tokens) > 1:
                raise MemoryError("no room for these")
            super().commit(tokens)

    pieces = BytePieces([b"one", b" tw", b"o s", b"top"])
    params = SamplingParams(temperature=0, max_tokens=9)
    sampler = Refusing(params, TokenLimits(50), [5], seed=0)
    text = AnswerText(IncrementalDetokenizer(pieces), SamplingParams(stop=("two stop", "one t!")))
    r = Request(0, [5], params, sampler, RequestLimits(100, frozenset({EOS})), text=text)
    r.commit(Verdict(tokens=(0,)))
    with pytest.raises(MemoryError):
        r.commit(Verdict(tokens=(1, 3), path=(0,), draft=Draft((1,), (-1,), 1)))
    r.fail("it failed")
    delta = r.take_delta()
    assert (delta.token_ids, delta.text, delta.drafted, delta.from_draft) == ((0,), "one", 0, 0)
    assert r.output_ids == [0]


@pytest.mark.parametrize("watched", [True, False])
def test_drafts_are_told_to_those_who_watch(watched: bool):
    params = SamplingParams(temperature=0, max_tokens=9)
    sampler = RequestSampler(params, TokenLimits(50), [5], seed=0)
    limits = RequestLimits(100, frozenset({EOS}))
    r = Request(0, [5], params, sampler, limits, RequestIdentity(reports_progress=watched))
    r.commit(Verdict(path=(1,), tokens=(8, 9), draft=Draft((7, 8, 6), (-1, -1, 1), 1)))
    r.commit(Verdict())  # nothing gained: nothing to tell
    r.commit(Verdict(tokens=(4,)))
    drafts = r.take_delta().drafts
    assert drafts == (
        (DraftShown((7, 8, 6), (-1, -1, 1), (1,), 2), DraftShown((), (), (), 1)) if watched else ()
    )
    assert r.take_delta().drafts == ()
