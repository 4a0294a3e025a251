"""Cohorts whose texts go to no draft node."""

from collections.abc import Callable, Sequence

from foreword.control.policy_file.document import CohortRule, PolicyFile

REMOTE = "remote"
"""The method that sends texts to draft nodes."""


def methods_within(
    policy: PolicyFile, rule: CohortRule, asked: Sequence[str], methods_of: Callable[[str], Sequence[str]]
) -> list[str]:
    """What is left of the methods that a request asks for: without draft nodes if its cohort names drafters and none of
    them asks nodes. A request may choose among drafters, not send a text away that is to stay.

    `methods_of` has the methods of a drafter of the file.
    """
    if rule.drafters is None:
        return list(asked)
    named = {*rule.drafters, *(one.drafter for one in policy.rollouts if one.cohort == rule.name)}
    if any(REMOTE in methods_of(name) for name in named):
        return list(asked)
    return [method for method in asked if method != REMOTE]
