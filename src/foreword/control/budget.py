"""The time that may be spent on trying drafters."""

from collections.abc import Collection
from dataclasses import dataclass, field

MOST_SAVED, START = 0.005, 0.01
"""Seconds that an account holds at most, or the cost of a try if that is more; seconds of the first one."""

HOST_PASS, HOST_REQUEST, HOST_OBSERVE = 4e-4, 1e-4, 3e-4
"""Seconds of the host beside the draft: per pass with a try, per request tried, and per step that a head observes."""

MOST_PROBES = 8
"""Requests that are tried in one step."""


@dataclass
class Account:
    """What one drafter may still spend."""

    balance: float
    dearest: float = 0.0  # the most expensive recent try, made or wanted


@dataclass
class ExplorationBudget:
    """Earns a share of the time of all steps and pays for tries, by drafter: an expensive one leaves others theirs."""

    spent: float = 0.0
    earned_from: float = 0.0  # seconds of steps
    accounts: dict[str, Account] = field(default_factory=dict)  # by drafter

    def earn(self, step_seconds: float, share: float, methods: Collection[str]) -> None:
        """Earn the share of a step for requests that these drafters could be tried for."""
        self.earned_from += step_seconds
        for method in methods:
            account = self._account(method)
            most = max(MOST_SAVED, account.dearest)
            earned = account.balance + share * step_seconds / len(methods)
            account.balance = max(account.balance, min(earned, most))

    def pay_probe(self, method: str, draft_seconds: float) -> None:
        """Pay for a draft that was only compared with the text."""
        self.pay(method, draft_seconds + HOST_REQUEST)

    def pay_observing(self, method: str) -> None:
        """Pay for a step that a head has observed so that it can be tried."""
        self._account(method).balance -= HOST_OBSERVE
        self.spent += HOST_OBSERVE

    def pay(self, method: str, seconds: float) -> None:
        """Pay for a try; where it costs more than there is, the next one waits the longer."""
        account = self._account(method)
        account.balance -= seconds
        account.dearest = max(0.98 * account.dearest, seconds)
        self.spent += seconds

    def settle(self, method: str, seconds: float) -> None:
        """Pay what a verified try has lost more than was paid for it; below 0: less, or a gain."""
        account = self._account(method)
        most = max(MOST_SAVED, account.dearest, account.balance)
        account.balance = min(account.balance - seconds, most)
        self.spent += seconds

    def affords(self, method: str, seconds: float) -> bool:
        """Return whether there is enough for a try; if not, it is saved for."""
        account = self._account(method)
        account.dearest = max(account.dearest, seconds)
        return account.balance >= seconds

    @property
    def has_any(self) -> bool:
        return any(account.balance > 0 for account in self.accounts.values())

    @property
    def share(self) -> float:
        """Share of the time of all steps that was spent; tries that won more than they took have cost nothing."""
        return max(self.spent, 0.0) / self.earned_from if self.earned_from else 0.0

    def _account(self, method: str) -> Account:
        found = self.accounts.get(method)
        if found is None:
            found = self.accounts[method] = Account(START / (1 + len(self.accounts)))
        return found
