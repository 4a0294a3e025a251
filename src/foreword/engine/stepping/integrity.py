"""Whether requests, queues and pages agree; for tests."""

from collections.abc import Iterable

from foreword.engine.requests.request import Request
from foreword.engine.stepping.scheduler import Scheduler
from foreword.kv.paged_cache import PagedCache


def check_queues(cache: PagedCache, scheduler: Scheduler, active: Iterable[Request]) -> None:
    """Raise `AssertionError` if they contradict each other; `active` are being answered."""
    cache.check_integrity()
    queued = [*scheduler.running, *scheduler.waiting]
    if sorted(r.request_id for r in queued) != sorted(r.request_id for r in active):
        raise AssertionError("the queues do not hold exactly the requests that are being answered")
    if any(cache.is_open(request.kv) for request in scheduler.waiting):
        raise AssertionError("a waiting request holds KV pages")
    if not all(cache.is_open(request.kv) for request in scheduler.running):
        raise AssertionError("a running request has no KV sequence")
    if cache.num_open != len(scheduler.running) + len(scheduler.kept_prompts):
        raise AssertionError("a KV sequence belongs to nobody")
