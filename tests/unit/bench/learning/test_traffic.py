"""Prompts of the traffic: different ones, the same for the same seed, and held-out ones that are never sent."""

import pytest

from foreword.bench.learning.traffic import GENERAL, SHIFTS, ShiftedTraffic, write_prompts
from foreword.errors import RequestError


@pytest.mark.parametrize("kind", [GENERAL, *SHIFTS])
def test_prompts_differ_and_depend_on_the_seed_alone(kind: str):
    prompts = write_prompts(kind, 200, seed=3)
    assert len(set(prompts)) == 200
    assert not any("{" in prompt for prompt in prompts), "every gap of a template is filled"
    assert write_prompts(kind, 50, seed=3) == prompts[:50]
    assert write_prompts(kind, 50, seed=4) != prompts[:50]


@pytest.mark.parametrize("shift", SHIFTS)
def test_held_out_prompts_are_never_sent(shift: str):
    traffic = ShiftedTraffic.of(shift, before=30, after=100, held_out=8, seed=0)
    assert set(traffic.held_out) == {GENERAL, shift}
    measured = {prompt for prompts in traffic.held_out.values() for prompt in prompts}
    assert len(measured) == 16
    assert measured.isdisjoint([*traffic.before, *traffic.after])
    assert (len(traffic.before), len(traffic.after)) == (30, 100)


def test_what_cannot_be_written_is_refused():
    with pytest.raises(RequestError, match="--shift must be one of sql, mail, german, not 'poems'"):
        ShiftedTraffic.of("poems", 1, 1, 1, 0)
    with pytest.raises(RequestError, match="fewer than 90000 prompts; lower --requests"):
        write_prompts("german", 90_000, 0)
