"""What computing masks has cost a request and its tenant, and when that is too much."""

from collections.abc import Callable
from threading import Lock
from time import monotonic, thread_time

from foreword.structured.limits import MaskLimits

Clock = Callable[[], float]


class TenantBudgets:
    """What the requests of each tenant have used beyond what their tokens may cost. Any thread may ask."""

    def __init__(self, limits: MaskLimits | None = None, now: Clock = monotonic) -> None:
        self.limits = limits or MaskLimits()
        self._now = now
        self._lock = Lock()
        self._used: dict[str, tuple[float, float]] = {}  # seconds of a processor, and when that was

    def spend(self, tenant: str, seconds: float) -> bool:
        """Add to what a tenant has used; return whether it is still within its budget."""
        with self._lock:
            now = self._now()
            used = self._left_of(tenant, now) + seconds
            self._used = {name: entry for name, entry in self._used.items() if self._left_of(name, now) > 0}
            self._used[tenant] = used, now
            return used <= self.limits.tenant_excess

    def _left_of(self, tenant: str, now: float) -> float:
        used, then = self._used.get(tenant, (0.0, now))
        return max(0.0, used - (now - then) * self.limits.tenant_refill)


class MaskBudget:
    """What the masks of one answer may cost: so much for every token, and an excess of its own and of its tenant."""

    def __init__(self, tenants: TenantBudgets, tenant: str = "", clock: Clock = thread_time) -> None:
        self._tenants = tenants
        self._tenant = tenant
        self.limits = tenants.limits
        self.clock = clock  # seconds of a processor that the calling thread has used
        self.used = 0.0
        self._free = self.limits.free_per_token  # for the first token
        self._excess = 0.0  # the most that was used beyond it

    @property
    def has_excess(self) -> bool:
        """Whether masks have taken more than the tokens so far may cost."""
        return self.used > self._free

    def earn(self, tokens: int) -> None:
        """Allow for the masks of more tokens."""
        self._free += tokens * self.limits.free_per_token

    def spend(self, seconds: float) -> str | None:
        """Add the cost of a mask; return why the answer cannot go on, None if it can."""
        self.used += seconds
        excess = self.used - self._free
        if seconds > self.limits.one_mask:
            return f"what may come next takes longer than {self.limits.one_mask:g} s to work out"
        if excess <= self._excess:
            return None
        more, self._excess = excess - self._excess, excess
        if excess > self.limits.request_excess:
            seconds = self.limits.request_excess
            return f"its masks have taken {seconds:g} s more than its tokens may; simplify the grammar"
        if not self._tenants.spend(self._tenant, more):
            return (
                f"masks of all requests of this tenant have taken {self.limits.tenant_excess:g} s more than their "
                "tokens may; wait, or simplify the grammars"
            )
        return None
