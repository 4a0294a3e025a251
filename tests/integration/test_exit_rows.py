"""An early exit on the target's own KV rows guesses what it guesses on KV rows of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.backends.interface import HeadInput
from foreword.backends.runner import ModelRunner
from foreword.drafters.model.exit_adapter import open_adapter
from foreword.engine.config import EngineConfig
from foreword.engine.messages import NewRequest
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.models.formats.opening import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask
from foreword.speculation.rows.layout import BatchBuffers, SequenceRows
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.exits import write_exit
from helpers.tiny_heads import HEAD_DIM, HIDDEN, KV_HEADS
from helpers.tiny_models import make_hf_model

LAYERS, EXIT = 4, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits")
    make_hf_model(folder / "target", num_hidden_layers=LAYERS)
    write_exit(folder / "target", folder / "exit", EXIT, noise=0.3)
    return folder


Guesses = dict[tuple[int, ...], tuple[int, ...]]
"""By the text that they follow, and how many were asked for."""


def decoded(
    folder: Path, backend: str, changes: dict[str, Any] | None, **config: Any
) -> tuple[Guesses, list[list[int]]]:
    """What was guessed, and the texts; without guesses if nothing is changed."""
    form = {
        "method": "layer_skip",
        "adapter": str(folder / "exit"),
        "num_speculative_tokens": 4,
        "fixed": True,
    }
    llm = LLM(
        str(folder / "target"),
        device="cpu",
        dtype="float32",
        backend=backend,
        speculation=None if changes is None else form | changes,
        config=EngineConfig(max_step_seconds=None, **config),  # the same passes, however fast
    )
    drafts: Guesses = {}
    if changes is not None:
        drafter: Any = llm.engine.drafters.default.drafter._drafter
        propose = drafter.propose

        def listen(asks: Sequence[Ask]) -> list[Draft]:
            found: list[Draft] = propose(asks)
            for ask, draft in zip(asks, found, strict=True):
                drafts[(*ask.request.tokens, min(ask.max_nodes, ask.max_depth))] = draft.tokens
            return found

        drafter.propose = listen
    requests = []
    for number, temperature in enumerate((0.0, 0.9, 0.0)):
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=14 + 5 * number, ignore_eos=True
        )
        requests += llm.engine.add(NewRequest(f"r{number}", tuple(range(9, 30 + 9 * number)), params))
    while llm.engine.has_requests:
        llm.engine.step()
    assert not llm.engine.faults and not llm.engine.drafters.fault_counts()
    llm.close()
    return drafts, [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_guesses_and_texts_are_those_of_an_exit_with_rows_of_its_own(folder: Path, backend: str):
    _, plain = decoded(folder, backend, None)
    own, texts = decoded(folder, backend, {"own_kv": True})
    shared, same_texts = decoded(folder, backend, {})
    assert texts == same_texts == plain
    both = [text for text in shared if shared[text] and text in own]
    assert len(both) > 5
    assert [shared[text] for text in both] == [own[text] for text in both]
    assert len(both) < sum(map(len, texts)) - 5, "some guesses are right"


@needs_cpu_kernels
@pytest.mark.parametrize("pages", range(9, 15))
def test_a_tree_of_an_exit_stays_within_the_pages_that_it_is_lent(folder: Path, pages: int):
    """Where few are left, a node too many would write another request's rows."""
    _, plain = decoded(folder, "cpu", None)
    size = pages * PAGE_SIZE * (LAYERS + 1) * 2 * KV_HEADS * HEAD_DIM * 4
    changes = {"tree_width": 4, "num_speculative_tokens": 32}
    guesses, texts = decoded(folder, "cpu", changes, kv_cache_memory_bytes=size, max_draft_share=1e9)
    assert texts == plain
    assert any(guesses.values())


@needs_cpu_kernels
def test_what_an_exit_cannot_do_is_refused(folder: Path):
    """Before anything is written: a wrong call must not reach behind its arrays."""
    decoder = cpu_decoder(folder / "target", "float32", threads=1)
    adapter = open_adapter(str(folder / "exit"), open_checkpoint(folder / "target"))
    rows = [RowSpec("exit", 1, KV_HEADS, HEAD_DIM), RowSpec("two", 2, KV_HEADS, HEAD_DIM)]
    runner, cache = ModelRunner.allocate(decoder, 64, PAGE_SIZE, rows), PagedCache(64)
    kv = cache.open()
    cache.reserve(kv, 8)

    def call(name: str, wanted: int, states: torch.Tensor | None, starts: Sequence[int] = (0,)) -> Any:
        part = SequenceRows(kv, [5, 6, 7], 3, Draft(), run_logits=wanted, first=0)
        arrays = BatchBuffers().lay_out(cache, [part], ()).arrays
        features = torch.empty(3, 0) if states is None else states
        given = HeadInput(arrays, np.array(starts, np.int32), features, are_own=states is None)
        return decoder.exit(adapter, EXIT, name).forward(given, runner.store)

    with pytest.raises(ValueError, match="there are no such KV rows"):
        call("decoder", 1, None)
    with pytest.raises(ValueError, match="the rows of one layer"):
        call("two", 1, None)
    with pytest.raises(ValueError, match="nothing comes of rows that are kept"):
        call("exit", 1, torch.zeros(3, HIDDEN))
    with pytest.raises(ValueError, match="do not fit"):
        call("exit", 0, torch.zeros(3, HIDDEN - 1))
    with pytest.raises(ValueError, match="do not fit"):
        call("exit", 1, None, starts=(0, 0))
    assert call("exit", 0, torch.zeros(3, HIDDEN)).logits.shape[0] == 0
    assert call("exit", 1, None).logits.isfinite().all()
