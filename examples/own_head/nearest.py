"""A drafter that reads the target's hidden states: it drafts what followed the most similar earlier state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.batch import Tap
from foreword.drafters.registry import DrafterKind, DrafterResources, TokenSelection
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import (
    Commit,
    Drafter,
    DrafterNeeds,
    DraftRequest,
    DraftSource,
    DraftTask,
    Traits,
)


@dataclass(frozen=True)
class NearestConfig:
    """Keys that a user may set."""

    min_cosine: float = 0.9  # below this similarity nothing is drafted


class NearestState(Drafter):
    """Drafts the tokens that followed the most similar earlier state."""

    def __init__(self, config: NearestConfig, tap: Tap) -> None:
        needs = DrafterNeeds(taps=(tap,))  # rows=(RowSpec(...),) would reserve KV rows in the pages
        self.traits = Traits(DraftSource.HEAD, needs)
        self._config, self._tap = config, tap
        # By request: position of the first state, states [positions, hidden].
        self._states: dict[int, tuple[int, Tensor]] = {}

    def observe(self, commits: Sequence[Commit]) -> None:
        """Receive prompt chunks, accepted draft tokens and corrections with their states; again after a preemption."""
        for commit in commits:
            new = torch.nn.functional.normalize(commit.hidden[self._tap].float(), dim=-1)
            first, states = self._states.get(commit.request.request_id, (commit.first, new[:0]))
            if not first <= commit.first <= first + len(states):
                first, states = commit.first, new[:0]
            self._states[commit.request.request_id] = (
                first,
                torch.cat((states[: commit.first - first], new)),
            )

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [self._draft(task) for task in tasks]

    def _draft(self, task: DraftTask) -> Draft:
        request = task.request
        first, states = self._states.get(request.request_id, (0, torch.empty(0)))
        # The newest token has no state yet.
        if len(states) < 2 or first + len(states) != len(request.tokens) - 1:
            return Draft()
        similarities = states[:-1] @ states[-1]
        best = int(similarities.argmax())
        if similarities[best] < self._config.min_cosine:
            return Draft()
        # The newest state led to the newest token. The similar state, at position `first + best`, led to the token
        # after that position. The draft is what followed that token.
        begin = first + best + 2
        tokens = request.tokens[begin : begin + min(task.max_nodes, task.max_depth)]
        return Draft.chain(tokens, len(request.tokens), request.epoch)

    def forget(self, request: DraftRequest) -> None:
        self._states.pop(request.request_id, None)


def build(config: NearestConfig, resources: DrafterResources) -> NearestState:
    return NearestState(config, Tap(resources.target.config.num_layers, normed=True))


KIND = DrafterKind(
    "what followed the most similar hidden state",
    NearestConfig,
    build,
    can_hang=False,
    selection=TokenSelection.CHOSEN,
)
