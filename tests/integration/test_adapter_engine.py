"""Adapters in an engine: whose pages they use, when they leave, and that guesses change nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.adapters import LoRARequest
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from foreword.errors import CheckpointError, ForewordError, RequestError
from helpers.adapters import ADAPTED, ALL, MergedCheckpoint, adapter_tensors, decoder_of, write_adapter
from helpers.clocks import ScriptedClock
from helpers.cpu import needs_cpu_kernels
from helpers.engines import ask, run
from helpers.scripted_drafters import RandomTreeDrafter

BACKENDS = ["torch", pytest.param("int8", marks=needs_cpu_kernels)]
PROMPT = [(7 * i * i + 3 * i) % ADAPTED.vocab_size for i in range(50)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, 4, seed=seed) for seed, name in enumerate(("sql", "code"))}


class Guesses(RandomTreeDrafter):
    """Trees of tokens that are sometimes right."""

    def __init__(self) -> None:
        super().__init__(lambda history, _: 1 + history[-1] % 5, ADAPTED.vocab_size, 0.5, seed=3)


def core_with(
    numbers: str, adapters: dict[str, Path], build: Any = None, checkpoint: Any = None
) -> EngineCore:
    parts = EngineParts(
        EngineConfig(kv_cache_memory_bytes=1 << 21, max_num_seqs=8),
        build_drafter=build,
        clock=ScriptedClock(tick=1e-4),
    )
    core = EngineCore(decoder_of(numbers, checkpoint), Vocabulary(ADAPTED.vocab_size, frozenset()), parts)
    for name, path in adapters.items():
        core.adapters.load(name, path)
    return core


def params(seed: int = 1, tokens: int = 20, temperature: float = 0.8) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed, ignore_eos=True)


def answer(core: EngineCore, adapter: str = "", prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    request = ask(core, prompt, params(), adapter=adapter, **options)
    run(core)
    assert request.finish_reason == "length"
    return request.output_ids


@pytest.mark.parametrize("numbers", BACKENDS)
def test_requests_of_one_batch_get_the_text_of_their_own_adapter(numbers: str, adapters: dict[str, Path]):
    alone = {name: answer(core_with(numbers, adapters), name) for name in ("", *adapters)}
    assert len({tuple(text) for text in alone.values()}) == 3
    core = core_with(numbers, adapters)
    together = {name: ask(core, PROMPT, params(), adapter=name) for name in alone}
    run(core)
    core.check_integrity()
    if numbers == "int8":  # there no text depends on what runs beside it
        assert {name: request.output_ids for name, request in together.items()} == alone
    merged = core_with(numbers, {}, checkpoint=MergedCheckpoint(adapters["sql"]))
    if numbers == "torch":
        assert answer(merged) == alone["sql"]


@pytest.mark.parametrize("numbers", BACKENDS)
def test_a_page_of_one_adapter_is_never_served_to_another(numbers: str, adapters: dict[str, Path]):
    core = core_with(numbers, adapters)
    fresh = {name: answer(core_with(numbers, adapters), name) for name in ("", *adapters)}
    for name in ("", "sql", "code", "sql", ""):
        before = core.cache.prefix_hits
        assert answer(core, name, tenant="a") == fresh[name]
        seen_before = name in ("sql", "") and core.cache.prefix_hits > before
        assert core.cache.prefix_hits == before or seen_before
    hits = core.cache.prefix_hits
    assert hits == 2 * 48  # the second request of the model and of sql
    answer(core, "sql", tenant="b")
    assert core.cache.prefix_hits == hits


def test_an_adapter_of_the_same_name_does_not_find_the_pages_of_the_one_before(adapters: dict[str, Path]):
    core = core_with("torch", {"one": adapters["sql"]})
    answer(core, "one")
    core.adapters.unload("one")
    core.adapters.load("one", adapters["code"])
    hits = core.cache.prefix_hits
    assert answer(core, "one") == answer(core_with("torch", adapters), "code")
    assert core.cache.prefix_hits == hits


@pytest.mark.parametrize("numbers", BACKENDS)
def test_an_adapter_that_is_unloaded_serves_those_who_have_it_to_their_end(
    numbers: str, adapters: dict[str, Path]
):
    expected = answer(core_with(numbers, adapters), "sql")
    core = core_with(numbers, adapters)
    running = ask(core, PROMPT, params(), adapter="sql")
    for _ in range(4):
        core.step()
    core.adapters.unload("sql")
    with pytest.raises(RequestError, match="there is no adapter 'sql': code"):
        ask(core, PROMPT, params(), adapter="sql")
    core.adapters.load("sql", adapters["code"])  # another one, in a slot of its own
    later = ask(core, PROMPT, params(), adapter="sql")
    assert later.adapter_slot != running.adapter_slot
    run(core)
    assert running.output_ids == expected
    assert later.output_ids == answer(core_with(numbers, adapters), "code")
    core.adapters.load("third", adapters["sql"])  # the slot is free again
    assert core.adapters.find("third").slot == running.adapter_slot  # type: ignore[union-attr]


def test_an_aborted_request_gives_its_adapter_back(adapters: dict[str, Path]):
    core = core_with("torch", adapters)
    new = NewRequest("a", tuple(PROMPT), params(), adapter="sql")
    core.add(new)
    with pytest.raises(RequestError, match="is being answered"):
        core.add(new)
    core.adapters.unload("sql")
    assert len(core.target._adapters) == 2
    core.abort("a")
    assert len(core.target._adapters) == 1


@pytest.mark.parametrize("numbers", BACKENDS)
def test_guesses_change_no_text_and_are_counted_by_adapter(numbers: str, adapters: dict[str, Path]):
    def build(config: SpeculationConfig) -> Guesses:
        return Guesses()

    plain = core_with(numbers, adapters)
    guessing = core_with(numbers, adapters, build)
    wish = {"method": "ngram", "num_speculative_tokens": 6, "fixed": True}
    texts: list[list[Request]] = []
    for core, setting in ((plain, False), (guessing, wish)):
        found = [
            ask(core, PROMPT[seed:], params(seed), adapter=name, speculation=setting)
            for seed in range(3)
            for name in ("", *adapters)
        ]
        run(core)
        core.check_integrity()
        texts.append(found)
    assert [r.output_ids for r in texts[0]] == [r.output_ids for r in texts[1]]
    cohorts = {name: drafted for name, (_, drafted, _) in guessing.stats().acceptance.items()}
    assert sorted(cohorts) == ["ngram/sampled", "ngram/sampled/code", "ngram/sampled/sql"]
    assert all(cohorts.values())


def test_names_and_files_that_are_wrong_change_nothing(adapters: dict[str, Path], tmp_path: Path):
    core = core_with("torch", adapters)
    with pytest.raises(RequestError, match="there is an adapter 'sql' already; unload it first"):
        core.adapters.load("sql", adapters["code"])
    with pytest.raises(CheckpointError, match="is not a directory"):
        core.adapters.load("new", tmp_path / "nowhere")
    with pytest.raises(RequestError, match="there is no adapter 'new': sql, code"):
        core.adapters.unload("new")
    with pytest.raises(RequestError, match="there is no adapter 'new': sql, code"):
        ask(core, PROMPT, params(), adapter="new")
    assert core.adapters.names == ("sql", "code")


def test_the_library_loads_what_a_call_asks_for_and_keeps_it(tiny_model: Path, tmp_path: Path):
    llm = LLM(str(tiny_model), backend="torch", dtype="float32", speculation="off")
    config = llm.loaded.decoder.config
    tensors = adapter_tensors(4, ALL, config=config)
    sql = LoRARequest("sql", str(write_adapter(tmp_path / "sql", 4, tensors=tensors)))
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    both = llm.generate(["a b", "a b"], greedy, lora_request=[sql, None], priority=[1, 0])
    assert both[0].outputs[0].token_ids != both[1].outputs[0].token_ids
    assert llm.adapters.names == ("sql",)
    shutil.rmtree(tmp_path / "sql")
    llm.offer([])  # lays the engine out anew, with what is loaded
    again = llm.generate("a b", greedy, lora_request=sql)[0]
    assert again.outputs[0].token_ids == both[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="was loaded from"):
        llm.generate("a b", greedy, lora_request=LoRARequest("sql", "elsewhere"))
    absent = SpeculationConfig.parse({"method": "draft_model", "model": str(tmp_path / "absent")})
    with pytest.raises(ForewordError, match="absent"):
        llm.offer([absent])  # the engine of before is made again
    assert llm.adapters.names == ("sql",)
    again = llm.generate("a b", greedy, lora_request=sql)[0]
    assert again.outputs[0].token_ids == both[0].outputs[0].token_ids
    llm.adapters.unload("sql")
    assert llm.adapters.names == ()
    llm.close()
