"""The time that may be spent on guesses that are only compared with the text."""

from collections.abc import Collection
from dataclasses import dataclass, field

MOST_SAVED = 0.005
"""Seconds that an account keeps at most, or the price of a probe if that is more: what was saved in quiet times would
else be spent at once when others come."""

BESIDE, BESIDE_EACH = 4e-4, 1e-4
"""Seconds that trying a drafter takes the host beside the draft itself: finding whom to ask, asking, sorting out what
it said; and, for each request, comparing its guesses with the text."""

MOST_PROBES = 8
"""Of one step."""

START = 0.01
"""Seconds of the first account to begin with, so that a first request is not over before anything was tried."""


@dataclass
class Account:
    """What one drafter may still spend."""

    balance: float
    dearest: float = 0.0  # probe of late, made or wanted


@dataclass
class TimeBank:
    """Earns a share of the time of all steps, and pays for probes. What they cost is never more than that.

    Drafters have an account each: one that is dear would else leave nothing for one that is all but free.
    """

    spent: float = 0.0
    earned_from: float = 0.0  # seconds of steps
    accounts: dict[str, Account] = field(default_factory=dict)  # by drafter

    def earn(self, step_seconds: float, share: float, methods: Collection[str]) -> None:
        """Of a step for requests that these drafters could be tried for."""
        self.earned_from += step_seconds
        for method in methods:
            account = self._account(method)
            most = max(MOST_SAVED, account.dearest)
            earned = account.balance + share * step_seconds / len(methods)
            account.balance = max(account.balance, min(earned, most))

    def pay_probe(self, method: str, draft_seconds: float) -> None:
        """Of a draft that was only compared with the text."""
        self.pay(method, draft_seconds + BESIDE_EACH)

    def pay_telling(self, method: str, seconds: float) -> None:
        """Of a drafter that was told of a text so that it can be tried."""
        self._account(method).balance -= seconds
        self.spent += seconds

    def pay(self, method: str, seconds: float) -> None:
        """A probe was dearer than expected: the next one waits the longer."""
        account = self._account(method)
        account.balance -= seconds
        account.dearest = max(0.98 * account.dearest, seconds)
        self.spent += seconds

    def settle(self, method: str, seconds: float) -> None:
        """A try has cost so much more than was paid for it; below 0: less, or it has won something."""
        account = self._account(method)
        most = max(MOST_SAVED, account.dearest, account.balance)
        account.balance = min(account.balance - seconds, most)
        self.spent += seconds

    def affords(self, method: str, seconds: float) -> bool:
        """Whether there is enough for a probe; if not, it is saved for."""
        account = self._account(method)
        account.dearest = max(account.dearest, seconds)
        return account.balance >= seconds

    @property
    def has_any(self) -> bool:
        return any(account.balance > 0 for account in self.accounts.values())

    @property
    def share(self) -> float:
        """Of the time of all steps, what was spent; tries that won more than they took have cost nothing."""
        return max(self.spent, 0.0) / self.earned_from if self.earned_from else 0.0

    def _account(self, method: str) -> Account:
        found = self.accounts.get(method)
        if found is None:
            found = self.accounts[method] = Account(START / (1 + len(self.accounts)))
        return found
