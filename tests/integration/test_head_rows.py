"""The KV rows of heads in the target's pages: whatever happened to a request, they are those of its text."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import HeadCall
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel, load_model
from foreword.engine.messages import NewRequest
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.speculation.drafting import DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry, draft_request_of
from helpers.cpu import needs_cpu_kernels
from helpers.exits import write_exit
from helpers.fresh_rows import Fresh, read
from helpers.taught_heads import hf_target, saved_heads, teach
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_cpu_kernels

FORMS: dict[str, dict[str, Any]] = {
    "eagle3 chain": {"method": "eagle3", "num_speculative_tokens": 3},
    "eagle3 tree": {"method": "eagle3", "num_speculative_tokens": 7, "tree_width": 3, "max_depth": 3},
    "eagle chain": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle tree": {"method": "eagle", "num_speculative_tokens": 8, "tree_width": 4, "max_depth": 3},
    "p_eagle chain": {"method": "p_eagle", "num_speculative_tokens": 4},
    "mtp tree": {"method": "mtp", "num_speculative_tokens": 7, "tree_width": 3, "max_depth": 3},
    "dflash chain": {"method": "dflash", "num_speculative_tokens": 5},
    "dflash tree": {"method": "dflash", "num_speculative_tokens": 9, "tree_width": 3},
    "exit chain": {"method": "layer_skip", "num_speculative_tokens": 3},
    "exit tree": {"method": "layer_skip", "num_speculative_tokens": 7, "tree_width": 3, "max_depth": 3},
    "two layers": {"method": "eagle3", "num_speculative_tokens": 6, "tree_width": 2, "max_depth": 3},
}
SYSTEM = tuple(range(30, 64))  # two pages and two tokens that many prompts begin with
TAUGHT = [(*SYSTEM, 5 * i, 7 * i, 11 * i, 3, 90 - i) for i in range(4)]  # what follows these, the heads know


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_hf_model(tmp_path_factory.mktemp("target"), num_hidden_layers=5)
    return load_model(str(path), dtype="int8", device="cpu", backend="cpu")


def plain_text(model: LoadedModel, prompt: tuple[int, ...], tokens: int) -> list[int]:
    core = EngineCore(model.decoder, model.vocabulary())
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    (request,) = core.add(NewRequest("plain", prompt, greedy))
    while core.has_requests:
        core.step()
    return request.output_ids


@pytest.fixture(scope="module")
def plain_answer(model: LoadedModel) -> list[int]:
    return plain_text(model, SYSTEM, 150)


@pytest.fixture(scope="module")
def heads(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads that guess right often enough for paths of trees to be accepted."""
    folder, target, vocab = tmp_path_factory.mktemp("heads"), hf_target(model.checkpoint.path), 360
    texts = [[*prompt, *plain_text(model, prompt, 30)] for prompt in TAUGHT]
    found = saved_heads(target, texts, vocab, (1, 3, 5), folder)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    head = TinyHead(vocab, draft_vocab=250, layers=2).eagle3()
    teach(head, target, texts, (1, 3, 5))
    found["layer_skip"] = write_exit(model.checkpoint.path, folder / "exit", layer=4)
    return found | {"two layers": head.save(folder / "two layers", draft_vocab_size=250, **ids)}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, heads: dict[str, Path]) -> dict[str, Any]:
    chosen = FORMS[request.param]
    key = "adapter" if chosen["method"] == "layer_skip" else "model"
    return {**chosen, key: str(heads.get(request.param, heads[chosen["method"]]))}


class Flickering(FixedPolicy):
    """Leaves requests out now and then, one of them for long."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rng = random.Random(4)

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        plans = super().plan(entries, situation)
        return [plan if self.rng.random() < 0.8 else None for plan in plans]


@contextmanager
def failing_passes(core: EngineCore) -> Iterator[None]:
    """Every ninth pass of the target fails."""
    forward, calls = core.runner.decoder.forward, [0]

    def failing(*args: Any) -> Any:
        calls[0] += args[1] is core.runner.store
        if calls[0] % 9 == 0 and args[1] is core.runner.store:
            raise ConnectionError("planted")
        return forward(*args)

    core.runner.decoder.forward = failing
    try:
        yield
    finally:
        core.runner.decoder.forward = forward


def test_rows_in_the_pages_are_those_of_the_text(model: LoadedModel, form: dict[str, Any]):
    """Through chunks, trees, forks, preemptions, prefix hits, failures and steps without guesses."""
    config = SpeculationConfig.parse(form)
    drafter = model.build_drafter(config)
    policy = Flickering(drafter, config.num_speculative_tokens, config.max_depth)
    sizes = EngineConfig(
        max_num_batched_tokens=48, max_num_seqs=4, kv_cache_memory_bytes=32 << 20, max_draft_share=100.0
    )
    core = EngineCore(model.decoder, model.vocabulary(), EngineParts(sizes, policy))
    fresh, rng, name = Fresh(model, form), random.Random(2), drafter.traits.needs.rows[0].name
    with failing_passes(core):
        compared, late, moved = _run(core, fresh, name, rng)
    assert compared > 400
    assert moved > 20 or "tree_width" not in form
    assert late < compared / 10
    assert core.cache.prefix_hits > 0
    assert core.scheduler.preemptions > 0
    assert not drafter.faults


def _run(core: EngineCore, fresh: Fresh, name: str, rng: random.Random) -> tuple[int, int, int]:
    compared = late = moved = steps = 0
    coming = 12
    while coming or core.has_requests:
        if coming and rng.random() < 0.3:
            coming -= 1
            prompt = rng.choice(TAUGHT) if coming % 3 else tuple(rng.choices(range(3, 360), k=40))
            params = SamplingParams(
                temperature=rng.choice((0.0, 0.0, 0.7)),
                seed=coming,
                max_tokens=30,
                n=rng.choice((1, 2)),
                ignore_eos=True,
            )
            core.add(NewRequest(f"r{coming}", prompt, params))
        steps += 1
        if core.scheduler.running and steps % 13 == 0:
            core.scheduler.preempt(rng.choice(core.scheduler.running))
        core.step()
        core.check_integrity()
        for request in core.scheduler.running:
            rows = request.kv.extra.get(name)
            if rows is None or rows.end < 2 or rng.random() < 0.85:
                continue  # a wrong row stays, and is seen later
            assert rows.end <= request.kv.computed
            if rows.begin > 0:
                late += rows.end - rows.begin
                continue
            found, expected = read(core.runner, request.kv, name, rows.end), fresh.rows(request, rows.end)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
            compared += rows.end
        moved += len(core.cache.pending_moves)
    return compared, late, moved


def test_a_prefix_hit_guesses_at_once_and_with_the_whole_past(model: LoadedModel, form: dict[str, Any]):
    config = SpeculationConfig.parse(form)
    parts = EngineParts(build_drafter=model.build_drafter, speculation=config)
    core = EngineCore(model.decoder, model.vocabulary(), parts)
    name = core.drafters.default.drafter.traits.needs.rows[0].name
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drafts: list[list[tuple[int, ...]]] = []
    for tail in ((7, 8, 9), (7, 8, 9), (200, 5)):
        (request,) = core.add(NewRequest("one", (*SYSTEM, *tail), params, progress=True))
        shown: list[tuple[int, ...]] = []
        while core.has_requests:
            for delta in core.step():
                shown += [draft.tokens for draft in delta.drafts]
            if request.finish_reason is None and name in request.kv.extra:
                assert request.kv.extra[name].begin == 0
        drafts.append(shown)
    assert core.cache.prefix_hits == 2 * 2 * PAGE_SIZE
    assert drafts[0] == drafts[1], "the guesses after a hit are those of the whole text"
    assert any(drafts[2][1:3])


def test_a_head_that_was_off_starts_again_from_the_last_states(
    model: LoadedModel, form: dict[str, Any], plain_answer: list[int]
):
    """Its past is shorter then; the text is the same, and while it is off it makes no pass."""

    class Switched(FixedPolicy):
        is_on = True

        def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
            return super().plan(entries, situation) if self.is_on else [None] * len(entries)

    config = SpeculationConfig.parse(form)
    drafter = model.build_drafter(config)
    policy = Switched(drafter, config.num_speculative_tokens, config.max_depth)
    core = EngineCore(model.decoder, model.vocabulary(), EngineParts(policy=policy))
    name = drafter.traits.needs.rows[0].name
    passes = [0]
    head: Any = drafter._drafter._rows_runner

    draft = head.draft

    def counted(call: HeadCall) -> Any:
        passes[0] += 1
        return draft(call)

    head.draft = counted
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    (request,) = core.add(NewRequest("one", SYSTEM, params))
    for _ in range(4):
        core.step()
    policy.is_on, before, last = False, passes[0], request.kv.extra[name].end
    while len(request.output_ids) < 100:
        core.step()
    assert passes[0] == before
    assert request.kv.extra[name].end == last
    policy.is_on = True
    core.step()
    rows = request.kv.extra[name]
    assert passes[0] > before
    assert rows.begin == len(SYSTEM) + 100 - 1 - 64 + (0 if "dflash" in name or "exit" in name else 1)
    while core.has_requests:
        core.step()
    assert request.output_ids == plain_answer


def test_a_drafter_of_a_request_and_one_of_the_policy_are_both_told(
    model: LoadedModel, heads: dict[str, Path]
):
    """Each has rows of its own in the same pages."""
    own = SpeculationConfig.parse({"method": "eagle", "model": str(heads["eagle"])})
    brought = model.build_drafter(
        SpeculationConfig.parse({"method": "eagle3", "model": str(heads["eagle3"])})
    )

    class Alternating(FixedPolicy):
        turn = 0

        def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
            self.turn += 1
            mine = DraftPlan("brought", brought, 3, 3)
            return [mine if self.turn % 2 else entry.request.speculation for entry in entries]

        def drafters(self) -> list[Any]:
            return [brought]

    parts = EngineParts(policy=Alternating(), build_drafter=model.build_drafter, speculation=own)
    core = EngineCore(model.decoder, model.vocabulary(), parts)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (request,) = core.add(NewRequest("one", SYSTEM, params))
    kinds: dict[str, int] = {}
    while core.has_requests:
        core.step()
        kinds |= {name: rows.end for name, rows in request.kv.extra.items() if rows.begin == 0}
    assert len(kinds) == 2
    assert min(kinds.values()) > len(SYSTEM) + 20
    assert not core.drafters.fault_counts() and not core.faults


def test_an_ask_without_states_is_answered_with_nothing(model: LoadedModel, heads: dict[str, Path]):
    drafter = model.build_drafter(
        SpeculationConfig.parse({"method": "eagle3", "model": str(heads["eagle3"])})
    )
    core = EngineCore(model.decoder, model.vocabulary(), EngineParts(policy=FixedPolicy(drafter, 3)))
    (request,) = core.add(NewRequest("one", (5,), SamplingParams(max_tokens=3, ignore_eos=True)))
    assert len(drafter.propose([DraftTask(draft_request_of(request), 3, 3)])[0]) == 0
    while core.has_requests:
        core.step()
    assert not drafter.faults
