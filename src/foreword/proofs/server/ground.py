"""What every check stands on."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foreword.proofs.server.abilities import Abilities
from foreword.proofs.server.answer import Answer
from foreword.proofs.server.client import Body, Server
from foreword.proofs.server.extent import Extent
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
    on_judged: Callable[[], None] = field(default=lambda: None)  # called after every case
    extent: Extent = field(default_factory=Extent)  # of the check that is running

    def judged(self, prompt: str, *answers: Answer) -> None:
        """Count the answers of one case, and report progress."""
        self.extent.add(prompt, answers)
        self.on_judged()

    def greedy(self, prompt: str, **fields: object) -> Body:
        """Return a request for the most likely text, without filters: a penalty changes greedy texts too."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 0.0}
        return self.with_logprobs({**body, **self.abilities.filters_off, **fields})

    def sampled(self, prompt: str, seed: int, **fields: object) -> Body:
        """Return a request for a text drawn from the model's own distribution, without filters."""
        body: Body = {"prompt": prompt, "max_tokens": self.plan.tokens, "temperature": 1.0}
        return {**body, "seed": self.seed + seed, **self.abilities.filters_off, **fields}

    def with_logprobs(self, body: Body) -> Body:
        """As many alternatives as the server lists."""
        return {**body, "logprobs": self.abilities.logprobs} if self.abilities.logprobs else body
