"""Draft nodes in this process, and targets that wait for all that such a node has to say."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foreword import LLM
from foreword.cluster import pairing, remote_drafter
from foreword.cluster.address import NodeAddress
from foreword.cluster.node_server import DraftNode
from foreword.cluster.remote_drafter import RemoteDrafter
from foreword.cluster.shared_nodes import NodesUse
from foreword.cluster.waiting import TokenRate
from foreword.drafters.config import SpeculationConfig
from foreword.engine.loader import LoadedModel
from foreword.wire.draft_node import NodeSettings, make_node

ANY_PORT = NodeAddress("127.0.0.1", 0)


@contextmanager
def running_node(loaded: LoadedModel, form: dict[str, Any], **settings: Any) -> Iterator[DraftNode]:
    """A node that drafts as the form says."""
    settings.setdefault("address", ANY_PORT)
    node = make_node(loaded, SpeculationConfig.parse(form), NodeSettings(**settings))
    node.start()
    try:
        yield node
    finally:
        node.close()


def wait_patiently(monkeypatch: pytest.MonkeyPatch, seconds: float = 30.0) -> None:
    """A target waits until all that it wants is there, or until its node has said that that is all.

    What is worth a wait depends on how fast the machine is, which no test must.
    """
    monkeypatch.setattr(
        remote_drafter, "best_wait_seconds", lambda prospects, rate: seconds if prospects else 0.0
    )
    monkeypatch.setattr(remote_drafter, "longest_wait_seconds", lambda prospects, rate: seconds)
    monkeypatch.setattr(TokenRate, "per_second", 1.0)
    # A node that a busy machine makes late is waited for, too.
    monkeypatch.setattr(pairing, "_late_in", lambda pair, now: seconds)
    for module in (pairing, remote_drafter):
        monkeypatch.setattr(module, "may_come", lambda pair, shadow: not pair.is_all)


def asking(address: object, **more: Any) -> dict[str, Any]:
    """Speculation by the nodes at this address."""
    return {
        "method": "remote",
        "drafters": str(address),
        "num_speculative_tokens": 5,
        "fixed": True,
        "shadow": 0,
        **more,
    }


def remote_of(llm: LLM) -> RemoteDrafter:
    """The drafter that an `LLM` asks."""
    plan = llm.engine.drafters.default
    assert plan is not None
    use = plan.drafter._drafter  # type: ignore[attr-defined]
    assert isinstance(use, NodesUse)
    return use.drafter


def until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that other threads do."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def until_connected(drafter: RemoteDrafter, nodes: int = 1) -> None:
    until(lambda: sum(node.state != "down" for node in drafter.nodes()) >= nodes)


def connect(drafter: Any) -> None:
    """Wait until a drafter that asks nodes can; others need not be waited for."""
    for guard in getattr(drafter, "_drafters", [drafter]):
        asked = getattr(guard, "_drafter", None)
        if isinstance(asked, NodesUse):
            until_connected(asked.drafter)
