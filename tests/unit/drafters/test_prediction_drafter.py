"""Following an expected answer through edits."""

import random

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.drafters.lookup.prediction import Follower, PredictionDrafter, count_followed
from foreword.speculation.drafting import DraftRequest, DraftTask

EXPECTED = list(range(100, 160))


def guesses_along(expected: list[int], answer: list[int], most: int = 8) -> list[int]:
    """How many of the guesses at every place of the answer are right."""
    follower, right = Follower(expected), []
    for place, token in enumerate(answer):
        guess = list(follower.continuation(most))
        hits = [a == b for a, b in zip(guess, answer[place:], strict=False)]
        right.append(hits.index(False) if False in hits else len(hits))
        follower.read([token])
    return right


def passes(expected: list[int], answer: list[int], most: int = 8) -> int:
    """Target passes for an answer whose guesses come from here alone."""
    follower, place, count = Follower(expected), 0, 0
    while place < len(answer):
        guess = follower.continuation(most)
        hits = [a == b for a, b in zip(guess, answer[place:], strict=False)]
        taken = (hits.index(False) if False in hits else len(hits)) + 1
        follower.read(answer[place : place + taken])
        place, count = place + taken, count + 1
    return count


def test_an_answer_as_expected_takes_a_ninth_of_the_passes():
    assert passes(EXPECTED, EXPECTED) == -(-len(EXPECTED) // 9)
    assert set(guesses_along(EXPECTED, EXPECTED)[:-8]) == {8}


EDITS = {
    "inserted": [*EXPECTED[:20], 1, 2, 3, *EXPECTED[20:]],
    "deleted": [*EXPECTED[:20], *EXPECTED[25:]],
    "replaced": [*EXPECTED[:20], 1, 2, *EXPECTED[22:]],
    "replaced by less": [*EXPECTED[:20], 1, *EXPECTED[26:]],
    "preceded": [1, 2, 3, 4, *EXPECTED],
    "begun late": EXPECTED[7:],
    "moved": [*EXPECTED[30:], *EXPECTED[:30]],
    "far away": [*EXPECTED[:4], *EXPECTED[50:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_it_finds_its_place_again_after_an_edit(edit: str):
    answer = EDITS[edit]
    new = sum(token < 100 for token in answer)
    # What is not expected takes a pass for each token, and finding the place again a few.
    assert passes(EXPECTED, answer) <= len(answer) // 9 + new + 7
    found = guesses_along(EXPECTED, answer)
    last_edit = max((i for i, token in enumerate(answer) if token < 100), default=0)
    if edit not in ("moved", "far away"):
        assert found[last_edit + 8] == min(8, len(answer) - last_edit - 8)


def test_of_equal_places_the_nearest_ahead_wins():
    follower = Follower([1, 2, 3, 4, 10, 11, 20, 10, 11, 30])
    follower.read([1, 2, 3, 4, 99, 10, 11])
    assert follower.continuation(1) == [20]


def test_a_false_place_does_not_move_the_search_on():
    expected = [5, 6, 7, 8, 9, 50, 51, 52, 53, 54, 9, 60, 61]
    follower = Follower(expected)
    follower.read([5, 6, 7, 8, 1])  # certain up to the 9
    follower.read([60])  # one token speaks for the end of the text ...
    assert follower.continuation(4) == [61]
    follower.read([50, 51])  # ... but the answer goes on before it
    assert follower.continuation(3) == [52, 53, 54]


def test_little_evidence_makes_few_guesses():
    follower = Follower(EXPECTED)
    follower.read([1, EXPECTED[10]])
    assert follower.continuation(8) == EXPECTED[11:13]
    follower.read(EXPECTED[11:12])
    assert follower.continuation(8) == EXPECTED[12:16]
    follower.read(EXPECTED[12:14])
    assert follower.continuation(8) == EXPECTED[14:22]


def test_work_is_bounded_where_everything_looks_the_same(monkeypatch: pytest.MonkeyPatch):
    compared = 0
    real = Follower._matched

    def counting(self: Follower, place: int) -> int:
        nonlocal compared
        compared += 1
        return real(self, place)

    monkeypatch.setattr(Follower, "_matched", counting)
    follower = Follower([7] * 20_000)
    follower.read([8, 7])
    assert compared <= 128


def test_what_it_says_depends_on_the_answer_alone():
    rng = random.Random(3)
    for _ in range(200):
        expected = [rng.randrange(12) for _ in range(60)]
        answer = [rng.choice([token, token, token, rng.randrange(12)]) for token in expected]
        slow, quick = Follower(expected), Follower(expected)
        quick.read(answer)
        while slow.read_tokens < len(answer):
            slow.read(answer[slow.read_tokens : slow.read_tokens + rng.randrange(1, 9)])
        assert (slow.continuation(8), slow.followed) == (quick.continuation(8), quick.followed)


def test_expected_tokens_in_the_answer_are_counted_once():
    assert count_followed(EXPECTED, EXPECTED) == 60
    assert count_followed(EXPECTED, EDITS["inserted"]) == 60
    assert count_followed(EXPECTED, EDITS["deleted"]) == 55
    assert count_followed(EXPECTED, EDITS["replaced"]) == 58
    assert count_followed(EXPECTED, [1, 2, 3]) == 0
    assert count_followed([], [1, 2, 3]) == 0
    assert count_followed([1, 2, 3, 4], [1, 2, 3, 4] * 5) == 4


def request(tokens: list[int], expected: list[int], epoch: int = 0) -> DraftRequest:
    sampler = RequestSampler(SamplingParams(temperature=0), TokenLimits(1 << 20), tokens, seed=0)
    return DraftRequest(1, tokens, sampler.drafting(), 2, epoch=epoch, prediction=expected)


def test_a_request_is_followed_from_its_prompts_end_until_it_ends():
    drafter = PredictionDrafter()
    asks = [DraftTask(request([1, 2, *EXPECTED[:3]], EXPECTED), 5, 4), DraftTask(request([1, 2], []), 5, 4)]
    drafts = drafter.propose(asks)
    assert drafts[0].tokens == tuple(EXPECTED[3:7])
    assert (drafts[0].committed_len, len(drafts[1])) == (5, 0)
    again = drafter.propose([DraftTask(request([1, 2, *EXPECTED[:5]], EXPECTED, epoch=2), 8, 8)])[0]
    assert (again.tokens, again.epoch) == (tuple(EXPECTED[5:13]), 2)
    assert drafter.memory_bytes() > 0
    prompt = EXPECTED[:2]  # what the prompt says is not yet answered
    other = request([*prompt], EXPECTED)._replace(request_id=2)
    assert drafter.propose([DraftTask(other, 3, 3)])[0].tokens == tuple(EXPECTED[:3])
    drafter.forget(other)
    drafter.forget(asks[0].request)
    assert drafter.memory_bytes() == 0
