"""The names of the acceptance rules, and which drafts each of them is exact for."""

from enum import IntEnum

from foreword.errors import RequestError


class Rule(IntEnum):
    """How a draft is judged; greedy is the limit of each at temperature 0."""

    COUPLED = 0  # any draft: a node is accepted if it is the token that the target drew
    TOKEN = 1  # chains: rejection sampling token by token (Leviathan et al., Chen et al. 2023)
    BLOCK = 2  # chains: rejection sampling of the chain as one block (Sun et al. 2024)

    @staticmethod
    def parse(name: str) -> "Rule":
        """The rule of this name, as a user writes it."""
        try:
            return Rule[name.upper()]
        except KeyError:
            known = ", ".join(rule.name.lower() for rule in Rule)
            raise RequestError(f"acceptance rule {name!r} is unknown; use one of: {known}") from None


def check_exact(rule: Rule, is_chain: bool) -> None:
    """Refuse a rule for a draft shape on which it would not keep the target's distribution."""
    if rule is not Rule.COUPLED and not is_chain:
        name = rule.name.lower()
        raise RequestError(
            f"acceptance rule {name!r} is exact for chains only; use 'coupled' for draft trees"
        )
