"""The names of the acceptance rules, and which drafts each of them is exact for."""

from enum import IntEnum

from foreword.errors import RequestError


class Rule(IntEnum):
    """How a draft is judged; greedy is the limit of each at temperature 0."""

    COUPLED = 0  # any draft: a node is accepted if it is the token that the target drew
    TOKEN = 1  # chains: rejection sampling token by token (Leviathan et al., Chen et al. 2023)
    BLOCK = 2  # chains: rejection sampling of the chain as one block (Sun et al. 2024)
    TRAVERSAL = 3  # trees of a fixed shape: *block* for trees, deepest nodes first (arXiv 2505.12398)

    @property
    def takes_trees(self) -> bool:
        """Whether a draft may have several nodes at one place."""
        return self in (Rule.COUPLED, Rule.TRAVERSAL)

    @staticmethod
    def parse(name: str) -> "Rule":
        """The rule of this name, as a user writes it."""
        try:
            return Rule[name.upper()]
        except KeyError:
            known = ", ".join(rule.name.lower() for rule in Rule)
            raise RequestError(f"acceptance rule {name!r} is unknown; use one of: {known}") from None


def check_exact(rule: Rule, is_chain: bool, is_fixed: bool = True) -> None:
    """Refuse a rule for a draft shape on which it would not keep the target's distribution.

    `is_fixed`: the shape of a tree, and which of its nodes are kept, does not depend on what was drawn.
    """
    name = rule.name.lower()
    if not rule.takes_trees and not is_chain:
        raise RequestError(
            f"acceptance rule {name!r} is exact for chains only; use 'coupled' or 'traversal' for draft trees"
        )
    if rule is Rule.TRAVERSAL and not is_chain and not is_fixed:
        raise RequestError(
            f"acceptance rule {name!r} needs trees whose shape is fixed before anything is drawn, and this drafter "
            "ranks its nodes by what was drawn; use 'coupled', or make chains"
        )
