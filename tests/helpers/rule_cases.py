"""Single requests for comparing rules with their references."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from foreword.acceptance.noise import Stream
from foreword.acceptance.reference import probabilities
from foreword.acceptance.rules.trees import Drawn
from foreword.proofs.cases import Case, SmallDrafter, target_logits
from foreword.speculation.draft import Draft
from helpers import rule_reference as reference


def row_after(case: Case, tokens: Sequence[int]) -> list[float]:
    logits = target_logits([case], [[[*case.prompt, *tokens]]])[0].tolist()
    return probabilities(logits, case.params, case.limits, case.prompt, tokens)


def noise_key(case: Case, stream: Stream, nonce: int, position: int, branch: int = 0) -> int:
    return reference.row_key(case.seed, case.sample, stream, nonce, position, branch)


def logits_along(case: Case, done: Sequence[int], draft: Draft) -> Tensor:
    paths = [[]]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    return target_logits([case], [[[*case.prompt, *done, *path] for path in paths]])


def random_chain(
    model: SmallDrafter, case: Case, done: list[int], rng: np.random.Generator
) -> tuple[list[int], tuple[Drawn | None, ...], list[list[float]], list[list[float]]]:
    tokens: list[int] = []
    drawn: list[Drawn | None] = []
    q: list[list[float]] = []
    p = [row_after(case, done)]
    for _ in range(int(rng.integers(1, 5))):
        guesses = list(model.next_tokens((*case.prompt, *done, *tokens)))
        token, law, _ = guesses[rng.choice(len(guesses), p=[chance for *_, chance in guesses])]
        row = np.zeros(case.limits.vocab_size)
        row[[token] if law is None else law.ids] = 1.0 if law is None else law.probs
        tokens.append(token)
        drawn.append(law)
        q.append(row.tolist())
        p.append(row_after(case, [*done, *tokens]))
    return tokens, tuple(drawn), q, p
