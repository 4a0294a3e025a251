"""Drafts the tokens that a structured-output grammar forces."""

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask, Traits


class GrammarDrafter(LookupDrafter[None]):
    """Drafts forced tokens: the keys of a schema, punctuation between them, and the end.

    They are verified like any draft; the grammar's mask leaves the target no other token.
    """

    traits = Traits(
        # Nearly always accepted: only a stop string or `max_tokens` can end the answer before a forced token.
        acceptance_by_level=(0.97,) * 16,
        follows="grammar",
        is_free=True,
        needs_target="the grammar of an answer is not sent to draft nodes",
    )

    def draft(self, task: DraftTask) -> Draft:
        """Return a chain; empty if more than one token is allowed."""
        grammar = task.request.sampling.grammar
        tokens = () if grammar is None else grammar.forced(min(task.max_nodes, task.max_depth))
        return Draft.chain(tokens, len(task.request.tokens), task.request.epoch)


KIND = chosen_kind(GrammarDrafter, "drafts the tokens that a structured-output grammar forces")
