"""Settings of the measured policy: each with its unit and its reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """What the policy risks, how soon it changes its mind, and how fast it learns and forgets.

    A policy file sets the margins and the shares; the others are the same everywhere.
    """

    # Decisions
    max_depth: int = 16  # levels of a draft; deeper ones are hardly ever accepted
    margin_on: float = 0.02  # expected gain at which a drafter is turned on; estimates err by 2%
    margin_off: float = 0.0  # expected gain below which it is turned off
    doubt: float = 0.02  # added to both after 30 draft requests, then falling with their root: noise
    dwell_steps: int = 32  # steps that a drafter stays off, so that noise cannot turn it on and off
    decision_steps: int = 64  # steps between two evaluations, each of which takes as long as ten plans
    decision_seconds: float = 1.0  # most time between two evaluations
    # Exploration
    probe_share: float = 0.01  # of the time of steps, while a drafter near break-even is new or has changed
    watch_share: float = 0.004  # the same, when the traffic has not changed for a while
    idle_probe_share: float = 0.0015  # the same, when drafting is far from a gain
    hopeless: float = -0.1  # gain below which drafting is far from one
    probe_levels: int = 4  # levels of a shadow draft where every level costs
    probe_saved_seconds: float = 0.005  # unspent budget of a drafter, at most; or one try
    probe_host_seconds: float = 4e-4  # host time of a step with a try, or in which a head observes for one
    watch_steps: int = 128  # steps that a head observes one request for a try; a quarter of them between two
    trial_steps: int = 64  # of so many steps, one verifies another depth: its cost may be wrong
    # Guard
    reference_share: float = 0.01  # of the steps, for plain windows against which the gain is measured
    sure_reference: float = 0.1  # part of it that is left where the gain is certain
    reference_window: int = 8  # steps of a plain window; the first still have the pace of speculation
    guard_ratio: float = 0.99  # measured ratio to plain decoding below which a drafter is turned off
    guard_retry_seconds: float = 60.0  # for this long, and twice as long each further time
    # Acceptance
    prior_drafts: float = 4.0  # pseudo-count of an unknown drafter's prior: tried, and soon corrected
    cohort_drafts: float = 20.0  # of pooled and published rates in a cohort: cohorts differ by so much
    lookup_drafts: float = 6.0  # the same for lookups, which differ more, and after a change
    new_requests: float = 30.0  # draft requests below which a cohort is new
    half_life_drafts: float = 600.0  # drafts after which counts weigh half; a tenth of it after a change
    half_life_seconds: float = 600.0  # engine time after which they do
    change_drafts: int = 500  # drafts after a change that are forgotten fast
    saved_requests: float = 200.0  # draft requests that saved counts weigh at most: traffic changes
    request_drafts: float = 12.0  # drafts of the cohort that a request's acceptance ratio is shrunk with


DEFAULTS = ControlSettings()
