"""What every check stands on."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.proofs.server.abilities import Abilities
from foreword.proofs.server.client import Body, Server
from foreword.proofs.server.plan import Plan


@dataclass(frozen=True)
class Ground:
    """The server, its fields and how much to ask."""

    server: Server
    plan: Plan
    abilities: Abilities
    plain: Server | None = None  # the same model without speculation: another server, or a field of this one
    tolerance: float = 0.05  # nats between two computations of one log probability that rounding may explain
    seed: int = 0  # the first of the seeds that are sent
    on_asked: Callable[[], None] = field(default=lambda: None)  # called after every case

    def greedy(self, prompt: str, **fields: object) -> Body:
        """The likeliest text."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 0.0, **fields}
        return self.with_logprobs(body)

    def sampled(self, prompt: str, seed: int, **fields: object) -> Body:
        """A text drawn from the model's own law, without filters."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 1.0}
        return {**body, "seed": self.seed + seed, **self.abilities.filters_off, **fields}

    def with_logprobs(self, body: Body) -> Body:
        """As many alternatives as the server lists."""
        return {**body, "logprobs": self.abilities.logprobs} if self.abilities.logprobs else body
