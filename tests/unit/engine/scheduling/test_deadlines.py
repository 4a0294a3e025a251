"""Answers end at their deadline, or before it where they could only be late."""

import pytest

from foreword.engine.scheduling.order import least_seconds
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter
from foreword.speculation.requests import DraftPlan
from helpers.service_world import ServiceWorld


def test_an_answer_ends_at_its_deadline_with_what_it_has():
    world = ServiceWorld()
    request = world.ask(tokens=60, deadline_ms=20)  # a step takes 1.1 ms
    deltas = []
    while world.core.has_requests:
        deltas += world.core.step()
    last = deltas[-1]
    assert (request.finish_reason, last.finish_reason) == ("deadline", "deadline")
    assert 10 < len(request.output_ids) < 20
    assert world.now == pytest.approx(0.020, abs=0.002)
    assert last.error == f"deadline_ms is 20, and {len(request.output_ids)} tokens were there by then"
    assert last.stats is not None
    world.core.check_integrity()


def test_one_that_waits_past_its_deadline_is_told_so():
    world = ServiceWorld(max_num_seqs=1)
    busy = world.ask(tokens=40)
    world.core.step()
    late = world.ask(tokens=5, deadline_ms=10)
    while late.finish_reason is None:
        world.core.step()
    assert late.finish_reason == "deadline"
    assert late.output_ids == []
    assert busy.finish_reason is None


def test_what_cannot_be_whole_in_time_is_refused_before_any_work():
    world = ServiceWorld()
    world.ask(tokens=12)
    while world.core.has_requests:
        world.core.step()
    steps = world.core.steps
    hopeless = world.ask(tokens=60, deadline_ms=20, on_deadline="refuse")
    (end,) = world.core.step()
    assert hopeless.finish_reason == "deadline"
    assert world.core.steps == steps
    assert end.error is not None
    assert end.error.startswith("deadline_ms is 20: 20 ms are left, and the answer needs at least ")
    in_time = world.ask(tokens=12, deadline_ms=20, on_deadline="refuse")
    while world.core.has_requests:
        world.core.step()
    assert in_time.finish_reason == "length"


def test_nothing_is_refused_before_anything_was_measured():
    world = ServiceWorld()
    request = world.ask(tokens=4, deadline_ms=1000, on_deadline="refuse")
    while world.core.has_requests:
        world.core.step()
    assert request.finish_reason == "length"


def test_one_that_is_put_off_for_too_long_is_given_up_when_it_can_no_longer_be_whole():
    world = ServiceWorld(max_num_seqs=1)
    world.ask(tokens=40)
    for _ in range(5):
        world.core.step()
    waiting = world.ask(tokens=10, deadline_ms=30, on_deadline="refuse")
    while waiting.finish_reason is None:
        world.core.step()
    assert waiting.finish_reason == "deadline"
    assert world.now < 0.03


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"deadline_ms": 0}, "deadline_ms must be positive, not 0"),
        ({"deadline_ms": float("nan")}, "deadline_ms must be positive, not nan"),
        (
            {"deadline_ms": 5, "on_deadline": "explode"},
            "on_deadline must be one of end, refuse, not 'explode'",
        ),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, object], complaint: str):
    with pytest.raises(RequestError, match=complaint):
        ServiceWorld().ask(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_cached", [True, False])
def test_what_would_be_in_time_is_not_refused(is_cached: bool):
    """A prompt whose rows are there already, and one that is longer than all that were timed of late."""
    world = ServiceWorld(enable_prefix_caching=is_cached)

    def answer(prompt, tokens: int = 1, **options):
        began = world.now
        request = world.ask(prompt=prompt, tokens=tokens, **options)
        while world.core.has_requests:
            world.core.step()
        return request.finish_reason, 1e3 * (world.now - began)

    texts = [[(7 * place + number) % 12 for place in range(90)] for number in range(6)]
    for text in texts:
        answer(text)
    for _ in range(5):
        answer(4, tokens=30)
    again = texts[0] if is_cached else [(5 * place + 3) % 12 for place in range(90)]
    _, taken = answer(again)
    fresh = texts[1] if is_cached else [(5 * place + 4) % 12 for place in range(90)]
    assert answer(fresh, deadline_ms=1.05 * taken, on_deadline="refuse") == ("length", pytest.approx(taken))


def test_one_of_several_answers_is_not_refused_for_a_prompt_that_the_first_reads():
    """Beside one that decodes, the first answer reads it in pieces; the second waits and copies the rows."""
    world = ServiceWorld(enable_prefix_caching=False, max_step_seconds=0.004)

    def answer(n: int, **options):
        began = world.now
        request = world.ask(prompt=90, tokens=2, n=n, **options)
        while request.finish_reason is None:
            world.core.step()
        return request.finish_reason, 1e3 * (world.now - began)

    for _ in range(6):
        answer(1)  # alone, in one piece: what a whole prompt takes is known
    world.ask(tokens=60)
    world.core.step()
    _, taken = answer(2)
    assert answer(2, deadline_ms=1.05 * taken, on_deadline="refuse") == ("length", pytest.approx(taken))


@pytest.mark.parametrize(("depth", "passes"), [(None, 12), (1, 6), (3, 3), (4, 3), (11, 1), (64, 1)])
def test_the_least_time_has_every_draft_accepted_and_one_token_more_a_pass(depth: int | None, passes: int):
    world = ServiceWorld()
    world.ask(tokens=12)
    while world.core.has_requests:
        world.core.step()
    drafter = Drafter()  # it is never called
    plan = None if depth is None else DraftPlan("any", drafter, depth, depth)
    costs, request = world.core.situation.costs, world.ask(prompt=1, tokens=12, plan=plan)
    step = costs.step_seconds(1)
    assert step is not None
    assert least_seconds(request, costs, running=1) == pytest.approx(passes * step)
