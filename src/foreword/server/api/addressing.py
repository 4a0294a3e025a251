"""What a body says about how, and how soon, it is to be answered, besides its prompt and its parameters."""

from dataclasses import replace

from foreword.engine.messages import NewRequest
from foreword.server.api.types.sampling_types import SamplingFields


def as_asked(request: NewRequest, body: SamplingFields, adapter: str) -> NewRequest:
    """The request with its body's adapter, priority and deadline.

    A priority that is a text is for the policy file alone.
    """
    return replace(
        request,
        labels=replace(request.labels, adapter=adapter),
        adapter=adapter,
        priority=body.priority if isinstance(body.priority, int) else 0,
        deadline_ms=body.deadline_ms,
        on_deadline=body.on_deadline or request.on_deadline,
    )
