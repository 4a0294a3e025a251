"""The arithmetic of speculation against known values and against dice."""

import json
import random
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.bench.theory import (
    FLAT,
    DraftingCost,
    RelativeStepCurve,
    best,
    break_even,
    expected_tokens,
    least_break_even,
    pass_cost,
    predict,
    read_step_costs,
    step_curve,
)
from foreword.cli.theory import parse_depths
from foreword.errors import RequestError

CURVE = step_curve({"rows": [{"n": 1, "ms": 10.0}, {"n": 4, "ms": 16.0}, {"n": 8, "ms": 32.0}]})


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 1, 1.5), (0.5, 2, 1.75), (0.8, 4, 3.3616), (0.9, 1, 1.9)],
)
def test_expected_tokens_by_hand(alpha: float, k: int, tokens: float):
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=1e-12)


@given(alpha=st.floats(0, 0.999), k=st.integers(1, 40))
def test_expected_tokens_is_the_closed_form(alpha: float, k: int):
    assert expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-9)


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 3), (0.8, 5), (0.95, 12)])
def test_dice_agree(alpha: float, k: int):
    dice, passes = random.Random(7), 20_000
    counts = [1 + len(list(takewhile(lambda _: dice.random() < alpha, range(k)))) for _ in range(passes)]
    mean = sum(counts) / passes
    spread = (sum((count - mean) ** 2 for count in counts) / passes) ** 0.5
    assert abs(mean - expected_tokens(alpha, k)) < 4 * spread / passes**0.5


@pytest.mark.parametrize(("alpha", "k", "width"), [(0.3, 3, 2), (0.6, 4, 3), (0.8, 2, 2)])
def test_dice_agree_about_trees(alpha: float, k: int, width: int):
    """A level is right if one of its guesses is; the pass goes on if that is the first of them."""
    dice, passes, counts = random.Random(3), 40_000, []
    for _ in range(passes):
        count = 1
        for _ in range(k):
            right = [dice.random() < alpha for _ in range(width)]
            count += any(right)
            if not right[0]:
                break
        counts.append(count)
    mean = sum(counts) / passes
    spread = (sum((count - mean) ** 2 for count in counts) / passes) ** 0.5
    assert abs(mean - expected_tokens(alpha, k, width)) < 4 * spread / passes**0.5


def test_a_round_trip_is_paid_once_and_a_tree_verifies_all_its_nodes():
    (far,) = predict(0.8, DraftingCost(0.05, network_cost=0.5), [4])
    assert far.speedup == pytest.approx(3.3616 / 1.7)
    (near,) = predict(0.8, DraftingCost(0.05), [4])
    assert far.break_even is not None
    assert near.break_even is not None
    assert far.break_even > near.break_even
    (tree,) = predict(0.5, DraftingCost(0.1, width=2), [3], CURVE)
    assert tree.nodes == 6
    assert tree.cost == pytest.approx(0.3 + 2.8)  # a pass over 7
    assert tree.tokens_per_pass == pytest.approx(1 + 0.75 * 1.75)
    for bad in (DraftingCost(0.1, network_cost=-1), DraftingCost(0.1, width=0)):
        with pytest.raises(RequestError, match=r"--network-cost|--tree-width"):
            predict(0.5, bad, [1])


def test_speed_up_is_tokens_over_time():
    (flat,) = predict(0.8, DraftingCost(0.05), [4])
    assert flat.speedup == pytest.approx(3.3616 / 1.2)
    (measured,) = predict(0.8, DraftingCost(0.05), [3], CURVE)
    assert measured.speedup == pytest.approx(2.952 / (0.15 + 1.6))


def test_the_curve_is_straight_between_neighbours_and_ends():
    assert [CURVE.ratio(n) for n in (1, 2, 4, 6, 8)] == pytest.approx([1.0, 1.2, 1.6, 2.4, 3.2])
    assert FLAT.ratio(1000) == 1.0
    with pytest.raises(RequestError, match="end at 8 new tokens and 8 draft tokens need 9"):
        CURVE.ratio(9)


def test_free_guesses_always_pay_and_sure_ones_pay_by_their_number():
    found = predict(1.0, DraftingCost(0.0), [1, 2, 7])
    assert [one.speedup for one in found] == [2.0, 3.0, 8.0]
    assert [one.break_even for one in found] == [0.0, 0.0, 0.0]
    assert best(found).k == 7
    nothing = predict(0.0, DraftingCost(0.0), [1, 2, 7])
    assert [one.speedup for one in nothing] == [1.0, 1.0, 1.0]
    assert best(nothing).k == 1  # the fewest of equals


def test_guesses_that_cost_a_pass_each_never_gain():
    found = predict(0.9, DraftingCost(1.0), [1, 2, 3])
    assert all(one.speedup < 1 for one in found)
    assert [one.break_even for one in found] == pytest.approx([1.0, 1.0, 1.0])
    assert [one.break_even for one in predict(0.9, DraftingCost(1.1), [1, 2])] == [None, None]
    assert least_break_even(predict(0.9, DraftingCost(1.1), [1, 2])) is None


def test_break_even_of_one_guess_is_its_cost():
    assert break_even(1, pass_cost(1, DraftingCost(0.05))) == pytest.approx(0.05)
    least = least_break_even(predict(0.5, DraftingCost(0.05), range(1, 10)))
    assert least is not None
    assert (least.k, least.break_even) == (1, pytest.approx(0.05))


@given(k=st.integers(1, 20), draft_cost=st.floats(0, 0.9))
def test_break_even_is_where_the_speed_up_is_one(k: int, draft_cost: float):
    limit = break_even(k, pass_cost(k, DraftingCost(draft_cost)))
    assert limit is not None
    assert predict(limit, DraftingCost(draft_cost), [k])[0].speedup == pytest.approx(1.0, abs=1e-9)
    assert expected_tokens(limit, k) >= pass_cost(k, DraftingCost(draft_cost))


@pytest.mark.parametrize(
    ("alpha", "cost", "depths"),
    [
        (-0.1, 0, [1]),
        (1.1, 0, [1]),
        (float("nan"), 0, [1]),
        (0.5, -1, [1]),
        (0.5, float("inf"), [1]),
        (0.5, 0, [0]),
    ],
)
def test_what_makes_no_sense_is_refused(alpha: float, cost: float, depths: list[int]):
    with pytest.raises(RequestError, match="--"):
        predict(alpha, DraftingCost(cost), depths)


def test_step_costs_are_read_with_or_without_a_table_before_them(tmp_path: Path):
    line = json.dumps(
        {"model": "x", "rows": [{"n": 2, "ms": 3.0, "ratio": 1.5}, {"n": 1, "ms": 2.0, "ratio": 1}]}
    )
    for text in (line, f"a table\n│ 1 │ 2.0 │\n{line}\n", json.dumps(json.loads(line), indent=2)):
        path = tmp_path / "costs.json"
        path.write_text(text)
        assert read_step_costs(path) == RelativeStepCurve(((1, 1.0), (2, 1.5)))


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "[]", "3", '{"rows": 3}', '{"rows": []}', '{"rows": [{"n": 2, "ms": 1}]}',
     '{"rows": [{"n": 1, "ms": 0}]}', '{"rows": [{"n": 1, "ms": null}]}', '{"rows": [{"ms": 1}]}'],
)  # fmt: skip
def test_other_files_are_refused_in_a_line(tmp_path: Path, text: str):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(RequestError, match="bench step --json"):
        read_step_costs(path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_step_costs(tmp_path / "none.json")


def test_depths():
    assert parse_depths("1..4") == [1, 2, 3, 4]
    assert parse_depths("8,2,2") == [2, 8]
    assert parse_depths("5") == [5]
    for text in ("", "a..b", "3..1", "0..4", "-1", "1..", "1..999999999", "2000"):
        with pytest.raises(RequestError, match="--k"):
            parse_depths(text)
