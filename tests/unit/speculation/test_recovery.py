"""Steps that fail and are tried again."""

import random
from collections import deque

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.speculation.recovery import UnderWay
from helpers.checked_target import CheckedTarget
from helpers.engines import ask, core_on
from helpers.saboteur import Saboteur


class OneFault(CheckedTarget):
    """One of its passes fails, before it has done anything."""

    def __init__(self, bad_pass: int) -> None:
        super().__init__(Saboteur(random.Random(0), 0.0))
        self._bad_pass = bad_pass
        self._begun = 0

    def forward(self, batch: ForwardBatch, store: object = None) -> ForwardOutput:
        self._begun += 1
        if self._begun == self._bad_pass:
            raise RuntimeError("planted")
        return super().forward(batch, store)


def test_a_launch_that_failed_keeps_its_requests_until_it_is_resolved():
    """Else the next launch takes them up, and the second try fails them for being under way already."""
    core = core_on(OneFault(bad_pass=2))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    request = ask(core, [1, 2, 3], params)
    under_way: deque[UnderWay] = deque()
    while core.has_requests:
        while len(under_way) < 2 and (launched := core.launch()) is not None:
            under_way.append(launched)
        core.resolve(under_way.popleft())
    assert (request.finish_reason, len(request.output_ids)) == ("length", 5)
    assert core.faults == {"step": 1}
    core.check_integrity()
