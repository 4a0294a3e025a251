"""Drafts what structured output leaves no choice about."""

from foreword.drafters.lookup.by_request import LookupDrafter
from foreword.drafters.registry import NoSettings, chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask, Traits


class GrammarDrafter(LookupDrafter[None]):
    """Drafts the tokens that must come: the keys of a schema, what stands between them, and the end.

    They are verified like any draft; that the target has no choice either is what its masks say.
    """

    traits = Traits(
        # Forced tokens are nearly always drawn: a stop text or `max_tokens` may end the answer before them.
        acceptance_by_level=(0.97,) * 16,
        follows="grammar",
        is_free=True,
        needs_target="the form of an answer stays with the target",
    )

    def draft(self, task: DraftTask) -> Draft:
        """A chain, empty where the answer can go on in more ways than one."""
        grammar = task.request.sampling.grammar
        tokens = () if grammar is None else grammar.forced(min(task.max_nodes, task.max_depth))
        return Draft.chain(tokens, len(task.request.tokens), task.request.epoch)


KIND = chosen_kind(
    "follows the form that the answer must have, where it leaves no choice",
    NoSettings,
    lambda _, __: GrammarDrafter(),
    traits=GrammarDrafter.traits,
)
