"""An early exit on the target's own KV rows guesses what it guesses on KV rows of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.backends.interface import HeadCall, HeadInput
from foreword.backends.runner import ModelRunner
from foreword.drafters.model.layer_skip import open_adapter
from foreword.engine.config import EngineConfig
from foreword.engine.messages import NewRequest
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.kv.spec import RowSpec
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, DraftTask, RequestRows
from foreword.speculation.layout import BatchBuffers, SequenceRows
from foreword.speculation.requests import draft_request_of
from helpers.cpu import cpu_decoder, needs_cpu_kernels
from helpers.exits import write_exit
from helpers.passes import torch_decoder
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


def decoded(folder: Path, backend: str, changes: dict[str, Any] | None) -> tuple[Guesses, list[list[int]]]:
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
        config=EngineConfig(max_step_seconds=None),  # the same passes, however fast
    )
    drafts: Guesses = {}
    if changes is not None:
        drafter: Any = llm.engine.drafters.default.drafter._drafter
        propose = drafter.propose

        def listen(asks: Sequence[DraftTask]) -> list[Draft]:
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
@pytest.mark.parametrize("room", [1, 2, 5])
def test_a_tree_of_an_exit_stays_within_the_rows_that_it_is_lent(folder: Path, room: int):
    """A row more would be another request's where pages are few."""
    form = {"method": "layer_skip", "adapter": str(folder / "exit"), "tree_width": 4, "fixed": True}
    llm = LLM(str(folder / "target"), device="cpu", dtype="float32", backend="cpu", speculation=form)
    engine = llm.engine
    (request,) = engine.add(
        NewRequest("r", tuple(range(9, 30)), SamplingParams(temperature=0, max_tokens=40))
    )
    while len(request.output_ids) < 4:
        engine.step()
    drafter: Any = engine.drafters.default.drafter._drafter
    draft_rows, seen = drafter._rows_runner.draft, []

    def watched(call: HeadCall) -> Any:
        seen.append(int(call.rows.arrays.kv_lens.max()))
        return draft_rows(call)

    drafter._rows_runner.draft = watched
    engine.cache.reserve(request.kv, len(request.tokens) - request.kv.computed + room)
    pages = RequestRows(request.kv, engine.cache, engine._stepper.store)
    (draft,) = drafter.propose([DraftTask(draft_request_of(request), 32, 8, pages)])
    assert len(draft) > room
    assert max(seen) == request.kv.reserved == len(request.tokens) + room


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_an_exit_that_joined_late_does_not_read_the_rows_before(folder: Path, backend: str):
    """Rows that it never filled may hold anything, such as NaN of a sequence before."""
    path, start = folder / "target", 2
    decoder: Any = torch_decoder(path) if backend == "torch" else cpu_decoder(path, "float32", threads=1)
    adapter = open_adapter(str(folder / "exit"), open_checkpoint(path))
    exit_rows = RowSpec("exit", 1, KV_HEADS, HEAD_DIM)
    runner, cache = ModelRunner.allocate(decoder, 4, PAGE_SIZE, [exit_rows]), PagedCache(4)
    kv = cache.open()
    cache.reserve(kv, 8)
    runner.forward(BatchBuffers().lay_out(cache, [SequenceRows(kv, [5, 6, 7], 3, Draft())], ()))
    first_exit = decoder.heads.exit(adapter, EXIT, "exit")

    def call(first: int, states: torch.Tensor | None, views_from_start: int) -> torch.Tensor:
        tokens = [5, 6, 7]
        part = SequenceRows(kv, tokens, 3 - first, Draft(), run_logits=states is None, first=first)
        features = torch.empty(3 - first, 0) if states is None else states
        arrays, starts = (
            BatchBuffers().lay_out(cache, [part], ()).arrays,
            np.array([views_from_start], np.int32),
        )
        rows = HeadInput(arrays, starts, features, are_own=states is None)
        found = first_exit.draft(HeadCall(rows, runner.store))
        return torch.as_tensor(found.logits).clone()

    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(3, HIDDEN, generator=generator)
    call(0, kept, 0)
    whole, late = call(2, None, 0), call(2, None, start)
    assert not torch.equal(whole, late), "the past counts where it is there"
    call(0, torch.full((3, HIDDEN), float("nan")), 0)
    call(2, kept[2:], 0)
    assert torch.equal(call(2, None, start), late)


@needs_cpu_kernels
def test_an_exit_that_joined_late_reads_none_of_the_rows_before(folder: Path):
    """Those hold what another request has left there."""
    form = {"method": "layer_skip", "adapter": str(folder / "exit"), "fixed": True}
    config = EngineConfig(max_num_batched_tokens=24, max_step_seconds=None)
    llm = LLM(
        str(folder / "target"), device="cpu", dtype="float32", backend="cpu", speculation=form, config=config
    )
    drafter: Any = llm.engine.drafters.default.drafter._drafter
    observe, draft_rows, starts = drafter.observe, drafter._rows_runner.draft, []

    def not_the_first_chunk(commits: Sequence[Commit]) -> None:
        if commits[0].first >= 24:
            observe(commits)

    def watched(call: HeadCall) -> Any:
        starts.append(call.rows.starts.tolist())
        return draft_rows(call)

    drafter.observe, drafter._rows_runner.draft = not_the_first_chunk, watched
    llm.engine.add(NewRequest("r", tuple(range(9, 53)), SamplingParams(temperature=0, max_tokens=4)))
    while llm.engine.has_requests:
        llm.engine.step()
    assert not llm.engine.faults and not llm.engine.drafters.fault_counts()
    assert len(starts) > 2
    assert set(map(tuple, starts)) == {(24,)}


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
        return decoder.heads.exit(adapter, EXIT, name).draft(HeadCall(given, runner.store))

    with pytest.raises(ValueError, match="there are no such KV rows"):
        call("decoder", 1, None)
    with pytest.raises(ValueError, match="the rows of one layer"):
        call("two", 1, None)
    with pytest.raises(ValueError, match="a pass that only stores KV rows has no logits"):
        call("exit", 1, torch.zeros(3, HIDDEN))
    with pytest.raises(ValueError, match="do not fit"):
        call("exit", 0, torch.zeros(3, HIDDEN - 1))
    with pytest.raises(ValueError, match="do not fit"):
        call("exit", 1, None, starts=(0, 0))
    assert call("exit", 0, torch.zeros(3, HIDDEN)).logits.shape[0] == 0
    assert call("exit", 1, None).logits.isfinite().all()
