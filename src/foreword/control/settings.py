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
    new_steps: int = 8  # the same while an estimate is new or calls have just become slow
    decision_seconds: float = 1.0  # maximum time between evaluations; twice that if all estimates are settled
    steady: float = 0.12  # relative change of the batch that triggers an evaluation
    slow_call: float = 0.2  # excess time of calls, as a fraction of a step, that triggers one if it repeats
    many_requests: int = 12  # requests from which expected rows replace their distribution
    negligible_time: float = 0.003  # fraction of a plain step below which a call's extra levels count as free
    cheap_call: float = 0.05  # the same for a lookup's whole call, which is then always made at full depth
    priced_rows: int = 32  # pass sizes at which marginal costs are computed
    rare_level: float = 0.02  # share of drafts with a level below which deeper ones are not requested
    # Exploration
    probe_share: float = 0.01  # fraction of step time, while a drafter near break-even is new or has changed
    near_probe_share: float = 0.0075  # the same for a known drafter with an expected gain above -`margin_on`
    idle_probe_share: float = 0.004  # the same at other times
    hopeless: float = -0.1  # gain below which a drafter is far from break-even
    probe_levels: int = 4  # depth of a shadow draft if levels cost time
    probe_requests: int = 8  # maximum requests tried per step
    probe_saved_seconds: float = 0.005  # maximum unspent budget of a drafter; or one try
    probe_host_seconds: float = 4e-4  # host time of a step with a try, or with a head observing for one
    watch_steps: int = 128  # steps that a head observes one request for a try; a quarter of that between two
    trial_steps: int = 64  # one of this many steps verifies another depth, to correct its cost
    first_gain: float = 0.05  # tokens per step that a lookup is expected to gain before a head, until known
    first_memory: float = 0.02  # weight of the newest step in that gain
    share_steps: int = (
        8  # steps whose `max_draft_share` may be spent at once: drafts rarely fit into one share
    )
    share_once: float = 0.5  # maximum lengthening of one such step by drafts, as a fraction of its plain time
    # Guard
    reference_share: float = 0.01  # fraction of steps in plain windows, against which the gain is measured
    sure_reference: float = 0.1  # fraction of that if the gain is certainly above `sure_gain`
    sure_gain: float = 0.1
    reference_window: int = 8  # steps per plain window; the first still have the pace of speculation
    guard_ratio: float = 0.99  # measured ratio to plain decoding below which a drafter turns off
    guard_errors: float = 2.33  # standard errors below that ratio: 1% false alarms per test
    guard_retry_seconds: float = 60.0  # initial off time; doubles each time
    # Acceptance
    prior_drafts: float = 4.0  # pseudo-count of an unknown drafter's prior: tried, and soon corrected
    # pseudo-count of pooled and published rates in a cohort: how much cohorts differ
    cohort_drafts: float = 20.0
    lookup_drafts: float = 6.0  # the same for lookups, which differ more, and after a change
    new_requests: float = 30.0  # draft requests below which a cohort is new
    half_life_drafts: float = 600.0  # half-life of counts in drafts; a tenth of it after a change
    half_life_seconds: float = 600.0  # half-life of counts in engine time
    change_slack: float = 0.25  # tokens per draft that the CUSUM of accepted minus expected tokens ignores
    change_limit: float = 10.0  # value of that sum which counts as a change
    change_drafts: int = 500  # drafts with fast forgetting after a change
    saved_requests: float = 200.0  # maximum pseudo-count of saved counts: traffic changes
    judged_drafts: int = 16  # maximum drafts counted per step; half of that once all is settled
    request_drafts: float = 12.0  # pseudo-count of the cohort in a request's acceptance ratio
    request_memory: float = 0.94  # decay of a request's own statistics per draft: about 16 drafts count


DEFAULTS = ControlSettings()
