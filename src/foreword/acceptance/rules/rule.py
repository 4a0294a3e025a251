"""Names of the acceptance rules, and the draft shapes for which each is exact."""

from enum import IntEnum

from foreword.errors import RequestError


class Rule(IntEnum):
    """An acceptance rule. At temperature 0 all rules give the target's greedy text."""

    COUPLED = 0  # any draft: a node is accepted if it equals the target's draw
    TOKEN = 1  # chains: rejection sampling token by token (Leviathan et al. 2023, Chen et al. 2023)
    BLOCK = 2  # chains: rejection sampling of the chain as one block (Sun et al. 2024)
    TRAVERSAL = 3  # fixed-shape trees: *block* for trees, deepest nodes first (arXiv 2505.12398)

    @property
    def takes_trees(self) -> bool:
        """Return whether a draft may have several nodes at one position."""
        return self in (Rule.COUPLED, Rule.TRAVERSAL)

    @staticmethod
    def parse(name: str) -> "Rule":
        try:
            return Rule[name.upper()]
        except KeyError:
            known = ", ".join(rule.name.lower() for rule in Rule)
            raise RequestError(f"acceptance rule {name!r} is unknown; use one of: {known}") from None


def check_exact(rule: Rule, is_chain: bool, is_fixed: bool = True) -> None:
    """Raise `RequestError` if the rule would not preserve the target's distribution for this draft shape.

    `is_fixed`: neither the shape of the tree nor the choice of its nodes depends on sampled tokens.
    """
    name = rule.name.lower()
    if not rule.takes_trees and not is_chain:
        raise RequestError(
            f"acceptance rule {name!r} is exact for chains only; use 'coupled' or 'traversal' for draft trees"
        )
    if rule is Rule.TRAVERSAL and not is_chain and not is_fixed:
        raise RequestError(
            f"acceptance rule {name!r} needs trees whose shape is fixed before a token is sampled, and this drafter "
            "selects its nodes by their sampled tokens; use 'coupled', or make chains"
        )
