"""Several drafters as one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from torch import Tensor

from foreword.backends.batch import Tap
from foreword.cluster.reports import NodeReport, all_nodes
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import (
    NO_NEEDS,
    Anticipates,
    Ask,
    Commit,
    Drafter,
    DrafterNeeds,
    DraftRequest,
    Expects,
    Observes,
    Unjudged,
    absent_of,
    added_memory,
    all_faults,
    anticipates,
    close_all,
    expects,
    may_be_absent,
    needs_of,
)


class _Several:
    """What all combinations do in the same way."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self.needs: DrafterNeeds = reduce(or_, map(needs_of, drafters), NO_NEEDS)
        self.expects = any(map(expects, drafters))
        self.anticipates = any(map(anticipates, drafters))
        self.may_be_absent = any(map(may_be_absent, drafters))

    @property
    def parts(self) -> Sequence[Drafter]:
        """Those that are combined."""
        return self._drafters

    @property
    def absent(self) -> tuple[str, ...]:
        """The names of those that can say nothing at present."""
        return tuple(name for drafter in self._drafters for name in absent_of(drafter))

    def observe(self, commits: Sequence[Commit]) -> None:
        """Tell those that need to know."""
        for drafter in self._drafters:
            if isinstance(drafter, Observes) and drafter.needs:
                drafter.observe(commits)

    def anticipate(self, unjudged: Sequence[Unjudged], hidden: Mapping[Tap, Tensor], drawn: Tensor) -> bool:
        """Let those draft early that can."""
        early = [one for one in self._drafters if isinstance(one, Anticipates) and one.anticipates]
        were_cold = [drafter.anticipate(unjudged, hidden, drawn) for drafter in early]
        return any(were_cold)

    def close(self) -> None:
        close_all(self._drafters)

    def expect(self, request: DraftRequest) -> None:
        for drafter in self._drafters:
            if isinstance(drafter, Expects) and drafter.expects:
                drafter.expect(request)

    def forget(self, request: DraftRequest) -> None:
        for drafter in self._drafters:
            drafter.forget(request)

    def memory_bytes(self) -> int | None:
        return added_memory(self._drafters)

    def fault_counts(self) -> Counter[str]:
        return all_faults(self._drafters)

    def nodes(self) -> list[NodeReport]:
        return all_nodes(self._drafters)


class FirstOf(_Several):
    """Asks one drafter after the other until one has something to say."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For every ask the first draft that is not empty."""
        drafts = [Draft()] * len(asks)
        open_asks = list(range(len(asks)))
        for drafter in self._drafters:
            answers = drafter.propose([asks[index] for index in open_asks]) if open_asks else ()
            for index, answer in zip(open_asks, answers, strict=True):
                drafts[index] = answer
            open_asks = [index for index in open_asks if not len(drafts[index])]
        return drafts


class Routed(FirstOf):
    """Several drafters of which a policy chooses one for each request; asked itself, it is the first that has one."""

    def __init__(self, choices: Mapping[str, Drafter]) -> None:
        super().__init__(list(choices.values()))
        self.choices = choices


class Merged(_Several):
    """Lays all drafters' guesses over each other as one tree. Its nodes are chosen, whoever drew them."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """For every ask one tree within its node budget."""
        answers = [
            [draft.rebase(ask.request.tokens) for draft, ask in zip(drafter.propose(asks), asks, strict=True)]
            for drafter in self._drafters
        ]
        return [
            merge(drafts, ask.max_nodes) for drafts, ask in zip(zip(*answers, strict=True), asks, strict=True)
        ]


def merge(drafts: Sequence[Draft], max_nodes: int) -> Draft:
    """One tree of all paths; the drafts take turns, level by level, until the budget is used up."""
    tokens: list[int] = []
    parents: list[int] = []
    numbers: dict[tuple[int, int], int] = {}  # (parent, token) -> node of the merged tree
    merged_as: list[dict[int, int]] = [{ROOT: ROOT} for _ in drafts]
    turns = sorted(
        (depth, which, node)
        for which, draft in enumerate(drafts)
        for node, depth in enumerate(draft.depths())
    )
    for _, which, node in turns:
        draft = drafts[which]
        parent = merged_as[which].get(draft.parents[node])
        if parent is None:
            continue
        key = (parent, draft.tokens[node])
        if key not in numbers and len(tokens) < max_nodes:
            numbers[key] = len(tokens)
            tokens.append(draft.tokens[node])
            parents.append(parent)
        if key in numbers:
            merged_as[which][node] = numbers[key]
    spoken = next((draft for draft in drafts if len(draft)), Draft())
    return Draft(tuple(tokens), tuple(parents), spoken.committed_len, spoken.epoch)
