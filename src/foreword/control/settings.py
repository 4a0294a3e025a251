"""Settings of the measured policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlSettings:
    """Margins, exploration and learning rates of the policy.

    A policy file can set the margins and the shares; the others are constant.
    """

    # Decisions
    max_depth: int = 16  # maximum draft depth; deeper levels are rarely accepted
    margin_on: float = 0.02  # expected gain that turns a drafter on; estimates err by 2%
    margin_off: float = 0.0  # expected gain below which it turns off
    # added to both margins after 30 draft requests, then decreasing with their square root: noise
    doubt: float = 0.02
    dwell_steps: int = 32  # minimum steps off, so that noise does not toggle a drafter
    decision_steps: int = 64  # steps between evaluations; an evaluation takes as long as ten plans
    decision_seconds: float = 1.0  # maximum time between evaluations; twice that if all estimates are settled
    many_requests: int = 12  # requests from which expected rows replace their distribution
    negligible_time: float = 0.003  # fraction of a plain step below which a call's extra levels count as free
    priced_rows: int = 32  # pass sizes at which marginal costs are computed
    rare_level: float = 0.02  # share of drafts with a level below which deeper ones are not requested
    few_drafters: int = 3  # drafters of which all combinations are compared
    # Exploration
    probe_share: float = 0.01  # fraction of step time, while a drafter near break-even is new or has changed
    watch_share: float = 0.004  # the same for steady traffic
    idle_probe_share: float = 0.0015  # the same if drafting is far from a gain
    hopeless: float = -0.1  # gain below which drafting counts as far from one
    probe_levels: int = 4  # depth of a shadow draft if levels cost time
    probe_saved_seconds: float = 0.005  # maximum unspent budget of a drafter; or one try
    probe_host_seconds: float = 4e-4  # host time of a step with a try, or with a head observing for one
    watch_steps: int = 128  # steps that a head observes one request for a try; a quarter of that between two
    trial_steps: int = 64  # one of this many steps verifies another depth, to correct its cost
    first_gain: float = 0.05  # tokens per step that a lookup is expected to gain before a head, until known
    first_memory: float = 0.02  # weight of the newest step in that gain
    # Guard
    reference_share: float = 0.01  # fraction of steps in plain windows, against which the gain is measured
    sure_reference: float = 0.1  # fraction of that if the gain is certain
    reference_window: int = 8  # steps per plain window; the first still have the pace of speculation
    guard_ratio: float = 0.99  # measured ratio to plain decoding below which a drafter turns off
    guard_retry_seconds: float = 60.0  # initial off time; doubles each time
    # Acceptance
    prior_drafts: float = 4.0  # pseudo-count of an unknown drafter's prior: tried, and soon corrected
    # pseudo-count of pooled and published rates in a cohort: how much cohorts differ
    cohort_drafts: float = 20.0
    lookup_drafts: float = 6.0  # the same for lookups, which differ more, and after a change
    new_requests: float = 30.0  # draft requests below which a cohort is new
    half_life_drafts: float = 600.0  # half-life of counts in drafts; a tenth of it after a change
    half_life_seconds: float = 600.0  # half-life of counts in engine time
    change_drafts: int = 500  # drafts with fast forgetting after a change
    saved_requests: float = 200.0  # maximum pseudo-count of saved counts: traffic changes
    judged_drafts: int = 16  # maximum drafts counted per step; half of that once all is settled
    request_drafts: float = 12.0  # pseudo-count of the cohort in a request's acceptance ratio


DEFAULTS = ControlSettings()
