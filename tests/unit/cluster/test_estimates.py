"""What a target expects of a node follows what the node did, also after it was read once."""

import pytest

from foreword.cluster.waiting import PRIOR_RATE, NodeEstimates
from foreword.speculation.draft import Draft


def test_levels_that_stop_coming_are_expected_less():
    estimates = NodeEstimates()
    expected = [PRIOR_RATE, PRIOR_RATE**2, PRIOR_RATE**3]
    assert estimates.survival(3) == pytest.approx(expected)
    estimates.record_depth(levels=1, wanted=3)
    assert estimates.survival(3) == pytest.approx([expected[0], 0.9 * expected[1], 0.9 * expected[2]])
    estimates.record_depth(levels=3, wanted=3)
    assert estimates.survival(2)[1] == pytest.approx(0.91 * expected[1])


def test_draft_tokens_that_are_judged_change_what_is_expected():
    estimates = NodeEstimates()
    before = estimates.survival(1)[0]
    estimates.judge(Draft.chain([5], 0), [6])
    assert estimates.survival(1)[0] < before
