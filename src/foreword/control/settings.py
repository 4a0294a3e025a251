"""The numbers that the measured policy works with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """How much is tried, how soon minds are changed, and what is never allowed."""

    max_depth: int = 16  # levels of a draft, whatever is asked for
    margin_on: float = 0.02  # a drafter is switched on if it promises at least this gain over plain decoding
    margin_off: float = 0.0  # and off if it promises less than this
    doubt: float = 0.02  # more than both margins for a drafter that was tried: noise promises as much
    dwell_steps: int = 32  # steps that a drafter that was switched off stays off at least
    decision_steps: int = (
        64  # steps between two looks at the estimates; four times as many while nothing changes
    )
    decision_seconds: float = 1.0  # and never longer than this
    probe_share: float = 0.01  # of the time of all steps, for drafts that are only compared with the text
    watch_share: float = 0.004  # of the same, when the traffic has not changed for a while
    idle_probe_share: float = 0.0015  # of the same, when guessing is far from paying
    hopeless: float = -0.1  # gain below which guessing is far from paying
    reference_share: float = 0.01  # of the steps, for plain windows that the gain is measured against
    sure_reference: float = 0.1  # part of it that is left where the gain is beyond doubt
    reference_window: int = 8  # steps
    guard_ratio: float = 0.99  # below this ratio to plain decoding a drafter is switched off
    guard_retry_seconds: float = 60.0  # for this long, and twice as long each further time
    seed: int = 0  # of the times of plain windows
