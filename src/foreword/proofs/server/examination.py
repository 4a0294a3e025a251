"""Examines a server: all checks in order, their number of requests, and the verdicts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.proofs.server.claims import CHECKS
from foreword.proofs.server.client import Broken, RefusedByServer, Server
from foreword.proofs.server.comparing import FailsTogether
from foreword.proofs.server.context import (
    Check,
    ClaimStatus,
    ClaimVerdict,
    ExaminationPlan,
    Extent,
    NotTried,
    ProofContext,
    Reproduction,
    not_tried,
    probe,
    refuted,
)


async def prepare(
    server: Server, plan: ExaminationPlan, plain: Server | None = None, tolerance: float = 0.05, seed: int = 0
) -> ProofContext:
    """Determine the server's abilities; raise `Broken` if it fails."""
    return ProofContext(server, plan, await probe(server), plain, tolerance, seed)


def chosen(names: Sequence[str]) -> Sequence[Check]:
    """Return the checks of these claims and of their dependencies."""
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"--only: there is no claim {unknown[0]!r}; there are {', '.join(known)}")
    wanted, added = set(names), set(names)
    while added:
        added = {dependency for name in added for dependency in known[name].rests_on} - wanted
        wanted |= added
    return [check for check in CHECKS if check.name in wanted]


def cost(context: ProofContext, checks: Sequence[Check] = CHECKS) -> dict[str, int]:
    """Return the maximum number of requests of each check, if it is not refuted; `probe` has sent its own."""
    return {check.name: check.cost(context) for check in checks}


async def examine(
    context: ProofContext,
    progress: StageProgress | None = None,
    checks: Sequence[Check] = CHECKS,
    seconds: float | None = None,
) -> AsyncIterator[ClaimVerdict]:
    """Yield the verdict of each check; checks that have not ended after `seconds` are not tried."""
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
    before = _requests_sent(context)
    total = sum(cost(context, checks).values())
    refuted_names: set[str] = set()
    plan = context.plan
    for check in checks:

        def show(name: str = check.name) -> None:
            if progress is not None:
                progress(name, min(_requests_sent(context) - before, total), total)

        show()
        fresh = replace(context, plan=plan, on_judged=show, extent=Extent())
        try:
            async with asyncio.timeout_at(deadline):
                verdict = await _verdict(check, fresh, refuted_names)
        except TimeoutError:
            verdict = replace(not_tried("no time was left"), check=check.name)
        if verdict.outcome is ClaimStatus.REFUTED:
            refuted_names.add(check.name)
        if verdict.outcome is ClaimStatus.FAILS_TOGETHER:
            plan = replace(plan, at_once=1)  # so that later checks can work
        yield verdict


def _requests_sent(context: ProofContext) -> int:
    return context.server.requests + (context.plain.requests if context.plain else 0)


async def _verdict(check: Check, context: ProofContext, refuted_names: set[str]) -> ClaimVerdict:
    """Return the check's verdict; it is not tried if a claim that it depends on was refuted."""
    # Without several answers per request, other checks do not depend on `n`.
    unused = {"n"} if context.abilities.n == 1 else set()
    if lost := [name for name in check.rests_on if name in refuted_names - unused]:
        verdict = not_tried(f"rests on {', '.join(lost)}, which was refuted")
    else:
        verdict = replace(await _examined(check, context), extent=context.extent)
    return replace(verdict, check=check.name)


async def _examined(check: Check, context: ProofContext) -> ClaimVerdict:
    """Return the check's verdict; if the server refuses or fails its requests, a verdict that says so."""
    try:
        return await check.examine(context)
    except NotTried as reason:
        return not_tried(str(reason))
    except RefusedByServer as refusal:
        return not_tried(f"the server refuses it: {refusal}")
    except Broken as fault:
        shown = Reproduction([fault.body], str(fault), "an answer")
        return refuted(1, f"the server fails: {fault}", shown)
    except FailsTogether as fault:
        context.judged(fault.prompt, fault.alone)
        count = len(fault.bodies)
        shown = Reproduction(fault.bodies, str(fault), "an answer to each, as alone", at_once=True)
        detail = f"{fault}, beside {count - 1} other(s); the same request alone is answered"
        return ClaimVerdict(ClaimStatus.FAILS_TOGETHER, count, detail, reproduction=shown)


def as_json(verdict: ClaimVerdict) -> dict[str, Any]:
    """Return a verdict as JSON."""
    shown = verdict.reproduction
    return {
        "check": verdict.check,
        "claim": next(check.claim for check in CHECKS if check.name == verdict.check),
        "verdict": verdict.outcome.value,
        "tried": verdict.tried,
        "prompts": len(verdict.extent.prompts),
        "tokens": verdict.extent.tokens,
        "fewest_tokens": verdict.extent.fewest,
        "detail": verdict.detail,
        "would_have_seen": verdict.visible,
        "reproduction": None
        if shown is None
        else {
            "requests": [dict(body) for body in shown.bodies],
            "at_once": shown.at_once,
            "got": shown.got,
            "expected": shown.expected,
        },
    }
