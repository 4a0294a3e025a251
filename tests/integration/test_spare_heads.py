"""Heads that are loaded while the engine runs, into spare KV rows of its pages."""

from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.cpu.decoder import CpuDecoder
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.drafting.drafter_pool import PagesLackRows
from foreword.engine.loader import LoadedModel, load_model
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.kv.spare_rows import SpareRows
from helpers.cpu import needs_cpu_kernels
from helpers.fresh_rows import Fresh, read
from helpers.taught_heads import hf_target, teach
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

SYSTEM = tuple(range(30, 64))  # two pages and two tokens
PROMPT = (*SYSTEM, 5, 7, 11)
TOKENS = 40
SHAPE = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


@pytest.fixture(
    scope="module",
    params=["torch", pytest.param("cpu", marks=needs_cpu_kernels)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_hf_model(tmp_path_factory.mktemp("target"))
    return load_model(str(path), dtype="float32", device="cpu", backend=request.param)


def greedy(core: EngineCore, prompt: tuple[int, ...] = PROMPT, **speculation: Any) -> Request:
    """The ended request of a greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    setting = (
        {"speculation": {**speculation, "num_speculative_tokens": 3, "fixed": True}} if speculation else {}
    )
    (request,) = core.add(NewRequest("one", prompt, params, **setting))
    while core.has_requests:
        core.step()
        core.check_integrity()
    return request


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> list[int]:
    return greedy(EngineCore(model.decoder, model.vocabulary())).output_ids


@pytest.fixture(scope="module")
def heads(model: LoadedModel, plain: list[int], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two heads of the same shape and different weights, which know the answer to `PROMPT`."""
    folder, target = tmp_path_factory.mktemp("heads"), hf_target(model.checkpoint.path)
    found = []
    for seed in (0, 1):
        head = TinyHead(360, draft_vocab=300, seed=seed).eagle3()
        teach(head, target, [[*PROMPT, *plain]], (0, 1, 2))
        found.append(str(head.save(folder / str(seed), draft_vocab_size=300, **SHAPE)))
    return found


def engine(model: LoadedModel, spare_heads: int = 1, default: str | None = None, **sizes: Any) -> EngineCore:
    spares = SpareRows()
    parts = EngineParts(
        EngineConfig(spare_heads=spare_heads, **sizes),
        build_drafter=model.drafter_builder(spares),
        speculation=None if default is None else SpeculationConfig.parse({"model": default, "fixed": True}),
        spare_rows=spares,
    )
    return EngineCore(model.decoder, model.vocabulary(), parts)


def accepted(request: Request) -> int:
    return request.accounting.acceptance.accepted


def test_a_head_that_is_loaded_later_drafts_in_spare_rows(
    model: LoadedModel, heads: list[str], plain: list[int]
):
    core = engine(model)
    assert greedy(core).output_ids == plain
    for head in (*heads, heads[0]):  # each has the spare after the one before has left it
        request = greedy(core, model=head)
        assert request.output_ids == plain
        assert accepted(request) > 10


def test_a_head_in_spare_rows_drafts_as_one_that_was_there_from_the_start(
    model: LoadedModel, heads: list[str]
):
    """Also after a hit on a prompt that another head had computed in the same rows."""
    core = engine(model)
    greedy(core, model=heads[0])
    hits = core.cache.prefix_hits
    later = greedy(core, model=heads[1])
    assert core.cache.prefix_hits > hits
    again = greedy(core, (*SYSTEM, 200, 5), model=heads[1])
    lone = engine(model, 0, heads[1])
    expected = greedy(lone, (*SYSTEM, 200, 5))
    assert again.output_ids == expected.output_ids
    assert accepted(later) > 10


def test_rows_of_an_earlier_head_are_never_taken_for_those_of_a_later_one(
    model: LoadedModel, heads: list[str]
):
    core = engine(model)
    greedy(core, model=heads[0])  # publishes the pages of the prompt, with this head's rows
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    later = {"model": heads[1], "num_speculative_tokens": 3, "fixed": True}
    (request,) = core.add(NewRequest("later", PROMPT, params, speculation=later))
    core.step()
    assert core.cache.prefix_hits == 2 * PAGE_SIZE
    (record,) = request.kv.extra.values()
    assert record.begin >= 2 * PAGE_SIZE or record.end < 2 * PAGE_SIZE, "these rows are the earlier head's"
    states = [name for node in request.kv.chain for name in node.states]
    assert not any(heads[0] in name for name in states), "nobody can read them any more"


def test_rows_in_a_reused_spare_are_those_of_the_text(model: LoadedModel, heads: list[str]):
    if not isinstance(model.decoder, CpuDecoder):
        pytest.skip("the comparison reads the layout of the CPU kernels")
    core = engine(model, enable_prefix_caching=False)
    greedy(core, model=heads[0])
    form = {"model": heads[1], "num_speculative_tokens": 3, "fixed": True}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    (request,) = core.add(NewRequest("later", PROMPT, params, speculation=form))
    fresh, compared = Fresh(model, form), 0
    while core.has_requests:
        core.step()
        for record in request.kv.extra.values():
            rows = read(core.runner, request.kv, "spare 1", record.end)
            for found, expected in zip(rows, fresh.rows(request, record.end), strict=True):
                assert torch.equal(found, expected)
            compared += record.end
    assert compared > 10 * len(PROMPT)


def test_heads_with_spares_of_their_own_run_at_once(model: LoadedModel, heads: list[str], plain: list[int]):
    core = engine(model, 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        core.add(NewRequest(head, PROMPT, params, speculation={"model": head, "fixed": True}))[0]
        for head in heads
    ]
    while core.has_requests:
        core.step()
    for request in requests:
        assert request.output_ids == plain
        assert accepted(request) > 10


def test_no_free_spare_is_refused_until_its_head_is_closed(model: LoadedModel, heads: list[str]):
    core = engine(model)
    core.drafters.keep([SpeculationConfig.parse({"model": heads[0]})])
    greedy(core, model=heads[0])
    with pytest.raises(PagesLackRows, match="name it when the engine is started"):
        greedy(core, model=heads[1])
    core.drafters.keep([])
    assert accepted(greedy(core, model=heads[1])) > 10
    params = SamplingParams(max_tokens=4)
    held = core.prepare(NewRequest("held", PROMPT, params, speculation={"model": heads[1]}))
    with pytest.raises(PagesLackRows):  # it was released, and stays open for its request
        greedy(core, model=heads[0])
    core.discard(held)
    assert accepted(greedy(core, model=heads[0])) > 10


def test_a_head_that_is_no_longer_kept_is_closed(model: LoadedModel, heads: list[str]):
    core = engine(model, 2)
    config = SpeculationConfig.parse({"model": heads[0]})
    core.drafters.keep([config])
    greedy(core, model=heads[0])
    assert core.drafters.created_by(config), "kept for later requests"
    core.drafters.keep([])
    assert not core.drafters.created_by(config)
    greedy(core, model=heads[0])
    assert not core.drafters.created_by(config), "closed with its last request"


def test_a_head_of_another_shape_has_no_place_in_a_spare(
    model: LoadedModel, heads: list[str], tmp_path: Path
):
    core = engine(model)
    wider = TinyHead(360, draft_vocab=200, layers=2).eagle3()
    path = str(wider.save(tmp_path / "two layers", draft_vocab_size=200, **SHAPE))
    with pytest.raises(PagesLackRows):
        greedy(core, model=path)
    assert accepted(greedy(core, model=heads[0])) > 10


def test_pages_count_the_bytes_of_spare_rows(model: LoadedModel, heads: list[str]):
    none, one, three = (engine(model, count).runner.store.bytes_per_row for count in (0, 1, 3))
    with_head = engine(model, 0, heads[0]).runner.store.bytes_per_row
    assert one == with_head > none
    assert three - none == 3 * (one - none)
    with pytest.raises(RequestError, match="spare_heads must be 0 or more, not -1"):
        EngineConfig(spare_heads=-1)
