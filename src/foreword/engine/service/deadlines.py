"""Requests that are of no use any more, or will not be."""

from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.service import Deadline

END, REFUSE = "end", "refuse"
ON_DEADLINE = (END, REFUSE)
"""An answer ends with what it has at its deadline; or as soon as it cannot be whole by then."""

DEADLINE = "deadline"
"""The `finish_reason` of such an answer."""


def deadline_of(new: NewRequest, arrived: float) -> Deadline | None:
    """By the clock that told when it arrived."""
    wanted = new.deadline_ms
    return None if wanted is None else Deadline(arrived + wanted / 1e3, wanted, new.on_deadline == REFUSE)


def reason_to_end(request: Request, now: float, costs: StepCosts, running: int, found: int = 0) -> str | None:
    """Why the answer should not be worked on any more; None: it may still be of use.

    `found` are rows that it need not compute although it has none yet.
    """
    deadline = request.deadline
    if deadline is None:
        return None
    told = f"deadline_ms is {deadline.milliseconds:g}"
    if now >= deadline.at:
        return f"{told}, and {len(request.output_ids)} tokens were there by then"
    if not deadline.must_be_whole:
        return None
    needed = least_seconds(request, costs, running, found)
    if now + needed <= deadline.at:
        return None
    left = 1e3 * (deadline.at - now)
    return f"{told}: {left:.0f} ms are left, and the answer needs at least {1e3 * needed:.0f} ms"


def least_seconds(request: Request, costs: StepCosts, running: int, found: int = 0) -> float:
    """What the answer takes at the very least, by measured costs: it may end early, and all guesses may be right."""
    params, plan = request.params, request.speculation
    never_stops = params.ignore_eos and not params.stop_texts and not params.stop_token_ids
    wanted = params.max_tokens if never_stops else max(params.min_tokens, 1)
    tokens = min(wanted - len(request.output_ids), request.room)
    passes = -(-max(tokens, 1) // (1 if plan is None else 1 + plan.max_depth))
    step = costs.step_seconds(max(running, 1)) or 0.0
    unread = max(len(request.tokens) - max(request.kv.computed, found) - 1, 0)
    first = max(step, costs.least_prompt_seconds(unread))  # the prompt's last step makes the first tokens
    return first + (passes - 1) * step
