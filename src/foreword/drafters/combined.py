"""Combines several drafters into one."""

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from foreword.backends.batch import Tap
from foreword.drafters.trees import TreeBuilder
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import (
    Commit,
    Drafter,
    DraftRequest,
    DraftTask,
    InFlight,
    NodeReport,
    Traits,
    added_memory,
    all_faults,
    all_node_reports,
    close_all,
)


class _CombinedDrafter(Drafter):
    """Base class of drafters that call several others."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.traits = Traits.combined([drafter.traits for drafter in drafters])

    @property
    def parts(self) -> Sequence[Drafter]:
        return self._drafters

    @property
    def absent(self) -> tuple[str, ...]:
        return tuple(name for drafter in self._drafters for name in drafter.absent)

    def observe(self, commits: Sequence[Commit]) -> None:
        for drafter in self._drafters:
            if drafter.traits.needs:
                drafter.observe(commits)

    def draft_early(self, unjudged: Sequence[InFlight], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        early = [drafter for drafter in self._drafters if drafter.traits.starts_early]
        were_cold = [drafter.draft_early(unjudged, hidden, drawn) for drafter in early]
        return any(were_cold)

    def close(self) -> None:
        close_all(self._drafters)

    def expect(self, request: DraftRequest) -> None:
        for drafter in self._drafters:
            if drafter.traits.expects_requests:
                drafter.expect(request)

    def forget(self, request: DraftRequest) -> None:
        for drafter in self._drafters:
            drafter.forget(request)

    def memory_bytes(self) -> int | None:
        return added_memory(self._drafters)

    def fault_counts(self) -> Counter[str]:
        return all_faults(self._drafters)

    def nodes(self) -> list[NodeReport]:
        return all_node_reports(self._drafters)


class FallbackDrafter(_CombinedDrafter):
    """Calls drafters in order until one returns a draft."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return the first non-empty draft of every task."""
        drafts = [Draft()] * len(tasks)
        without_draft = list(range(len(tasks)))  # indices of tasks
        for drafter in self._drafters:
            if not without_draft:
                break
            new_drafts = drafter.propose([tasks[index] for index in without_draft])
            for index, draft in zip(without_draft, new_drafts, strict=True):
                drafts[index] = draft
            without_draft = [index for index in without_draft if not len(drafts[index])]
        return drafts


class RoutedDrafter(FallbackDrafter):
    """Lets the policy select a drafter for each request. Without a selection, it returns the first non-empty draft."""

    def __init__(self, choices: Mapping[str, Drafter]) -> None:
        super().__init__(list(choices.values()))
        self.choices = choices


class MergedDrafter(_CombinedDrafter):
    """Merges all drafts into one tree, whose nodes count as chosen even if a drafter sampled them."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Return one tree per task, within its node budget."""
        drafts_of_task: list[list[Draft]] = [[] for _ in tasks]
        for drafter in self._drafters:
            for task, drafts, draft in zip(tasks, drafts_of_task, drafter.propose(tasks), strict=True):
                drafts.append(draft.rebase(task.request.tokens))
        return [merge(drafts, task.max_nodes) for task, drafts in zip(tasks, drafts_of_task, strict=True)]


def merge(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """Merge all paths into one tree, level by level, the drafts in order, up to `max_nodes` nodes."""
    tree = TreeBuilder()
    # For each draft: its node -> the same node in the merged tree.
    merged_nodes: list[dict[int, int]] = [{ROOT: ROOT} for _ in drafts]
    by_level = sorted(
        (depth, index, node)
        for index, draft in enumerate(drafts)
        for node, depth in enumerate(draft.depths())
    )
    for _, index, node in by_level:
        draft, merged = drafts[index], merged_nodes[index]
        parent = merged.get(draft.parents[node])
        merged_node = None if parent is None else tree.add(parent, draft.tokens[node], max_nodes)
        if merged_node is not None:
            merged[node] = merged_node
    nonempty = next((draft for draft in drafts if len(draft)), Draft())
    return Draft(tree.tokens, tree.parents, nonempty.committed_len, nonempty.epoch)
