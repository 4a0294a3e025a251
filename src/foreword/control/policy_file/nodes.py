"""Removes the method `remote` where a cohort's texts may not be sent to draft nodes."""

from collections.abc import Callable, Sequence

from foreword.control.policy_file.document import CohortRule, PolicyFile

REMOTE = "remote"
"""The method that sends texts to draft nodes."""


def permitted_methods(
    policy: PolicyFile, rule: CohortRule, requested: Sequence[str], methods_of: Callable[[str], Sequence[str]]
) -> list[str]:
    """Return the requested methods that the cohort permits.

    If the cohort names drafters and none of them uses draft nodes, `remote` is removed: a request may not override
    the operator's choice to keep texts on this machine. `methods_of` returns the methods of a drafter of the file.
    """
    if rule.drafters is None:
        return list(requested)
    named = {*rule.drafters, *(one.drafter for one in policy.rollouts if one.cohort == rule.name)}
    if any(REMOTE in methods_of(name) for name in named):
        return list(requested)
    return [method for method in requested if method != REMOTE]
