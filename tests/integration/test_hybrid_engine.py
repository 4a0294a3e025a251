"""Models with recurrent layers in the engine: the same text with and without speculation, shared and preempted."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from foreword.kv.chunks import CHUNK
from foreword.structured.params import StructuredOutputs
from helpers.cpu import needs_cpu_kernels
from helpers.cuda import needs_cuda
from helpers.drafted_answers import PROMPTS, answers, mixed_params, noisy_copy
from helpers.gated_modules import CONFIG, DIM, EXPERTS, module_tensors
from helpers.tiny_families import make_family
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import TINY_VOCAB, make_hf_model

FORMS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 12, "min_match": 1, "min_probability": 0.05},
    {"method": "jacobi", "num_speculative_tokens": 6},
    {
        "method": "lookahead",
        "num_speculative_tokens": 40,
        "window_size": 5,
        "ngram_size": 4,
        "guess_set_size": 5,
    },
    {"method": ["lookahead", "suffix"], "num_speculative_tokens": 24, "combine": "merge"},
    {"method": "draft_model", "num_speculative_tokens": 12, "tree_width": 3},
    {"method": "eagle3", "num_speculative_tokens": 4},
    {"method": "eagle3", "num_speculative_tokens": 9, "tree_width": 3, "max_depth": 4},
]
KINDS = ["qwen3_5", "granite_dense", "lfm2"]
MEMORY = 1 << 24
CROSSING = [
    {"prompt_token_ids": ids} for ids in ([20, 21, 22, 23] * (CHUNK // 2 - 1), [7, 3] * (CHUNK // 2 - 2))
]
"""Prompts that end shortly before the end of a chunk, the first with a state at the end of another chunk."""
PARAMS = mixed_params(len(CROSSING), max_tokens=16)


def loaded(path: Path, backend: str, **config: Any) -> LLM:
    sizes = {"kv_cache_memory_bytes": MEMORY} | config
    dtype, device = "int8" if backend == "cpu" else "float32", "cuda" if backend == "cuda" else "cpu"
    return LLM(str(path), dtype=dtype, device=device, backend=backend, config=EngineConfig(**sizes))


BACKENDS = {"torch": (), "cpu": (needs_cpu_kernels,), "cuda": (needs_cuda,)}


def models(backend: str, *names: str) -> list[Any]:
    return [pytest.param((name, backend), marks=BACKENDS[backend], id=f"{name}-{backend}") for name in names]


# What torch computes for each kind is compared in test_hybrids.py: one of them shows what the engine makes of it.
@pytest.fixture(
    scope="module", params=models("torch", KINDS[0]) + models("cpu", *KINDS) + models("cuda", *KINDS)
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, backend = request.param
    return name, backend


@pytest.fixture(scope="module")
def path(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(case[0]), case[0])[0]


@pytest.fixture(scope="module")
def backend(case: tuple[str, str]) -> str:
    return case[1]


@pytest.fixture(scope="module")
def llm(path: Path, backend: str) -> LLM:
    return loaded(path, backend)


@pytest.fixture(scope="module")
def forms(path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    draft = noisy_copy(
        make_hf_model(tmp_path_factory.mktemp("small"), "llama", tied=True),
        tmp_path_factory.mktemp("d") / "m",
    )
    head = (
        TinyHead(TINY_VOCAB)
        .eagle3()
        .save(tmp_path_factory.mktemp("head"), eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    )
    models = {"draft_model": str(draft), "eagle3": str(head)}
    return [
        form | {"fixed": True} | ({"model": models[form["method"]]} if str(form["method"]) in models else {})
        for form in FORMS
    ]


def test_the_text_is_that_of_plain_decoding_with_every_drafter_and_prefix_hits(
    llm: LLM, forms: list[dict[str, Any]]
):
    """All drafters in one batch, and one of them alone; texts cross chunks and begin with states of the plain ones."""
    llm.speculate(None)
    plain = answers(llm, CROSSING, PARAMS)
    llm.offer([SpeculationConfig.parse(form) for form in forms])
    asked = [(number, form) for number in range(len(CROSSING)) for form in forms]
    together = llm.generate(
        [CROSSING[number] for number, _ in asked],
        [PARAMS[number] for number, _ in asked],
        speculation=[form for _, form in asked],
    )
    for (number, form), output in zip(asked, together, strict=True):
        assert output.outputs[0].token_ids == plain[number], form
    for form in forms:
        assert sum(o.timings.draft_n for (_, f), o in zip(asked, together, strict=True) if f is form) > 0, (
            form
        )
    alone = llm.generate(CROSSING[:1], PARAMS[:1], speculation=forms[-1])
    assert alone[0].outputs[0].token_ids == plain[0]
    stats = llm.engine.stats()
    assert stats.prefix_hits > 0
    assert stats.state_hits > 0
    assert stats.state_checkpoints > 0
    llm.engine.check_integrity()


def test_answers_to_one_prompt_share_it(llm: LLM):
    prompt = {"prompt_token_ids": list(range(5, 105)) + [7, 9] * 10}
    params = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=14, ignore_eos=True)
    together = [answer.token_ids for answer in llm.generate([prompt], params)[0].outputs]
    again = [answer.token_ids for answer in llm.generate([prompt], params)[0].outputs]
    assert together == again
    assert len(set(map(tuple, together))) > 1
    llm.engine.check_integrity()


def test_preempted_requests_go_on_with_the_same_text(
    path: Path, backend: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    prompts = [{"prompt_token_ids": list(range(first, first + 55))} for first in (5, 50, 99)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    spec = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1, "fixed": True}
    monkeypatch.setattr(EngineConfig, "num_pages", lambda *_: 14)
    small = loaded(path, backend, max_num_seqs=4, state_cache_bytes=0)
    found = [output.outputs[0].token_ids for output in small.generate(prompts, params, speculation=spec)]
    assert small.engine.stats().preemptions > 0
    assert found == expected


def test_steps_in_flight_write_the_same_text(path: Path, backend: str, llm: LLM):
    prompts = [*CROSSING, *PROMPTS[3:5]]  # more tokens than a pass takes
    params = mixed_params(len(prompts), max_tokens=16)
    ahead = loaded(path, backend, steps_ahead=2, max_num_batched_tokens=100)
    assert answers(ahead, prompts, params) == answers(llm, prompts, params)
    ahead.engine.check_integrity()


def test_a_structured_answer_is_the_same(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=16, structured=StructuredOutputs(regex="(ab|cd){5,6}"))
    spec = {"method": ["grammar", "ngram"], "num_speculative_tokens": 6, "fixed": True}
    plain, drafted = (
        llm.generate(CROSSING[1:], params, speculation=setting)[0].outputs[0].text
        for setting in (False, spec)
    )
    assert plain == drafted


MTP = ("qwen3_5", "qwen3_next")


@pytest.mark.parametrize("model", models("torch", MTP[0]) + models("cpu", *MTP) + models("cuda", *MTP))
def test_their_mtp_modules_draft(tmp_path: Path, model: tuple[str, str]):
    name, backend = model
    sizes = {"head_dim": DIM, "intermediate_size": CONFIG["intermediate_size"]}
    own = {"num_experts": EXPERTS} if name == "qwen3_next" else {}
    directory, _ = make_family(tmp_path, name, **sizes, **own)
    tensors = load_file(directory / "model.safetensors") | module_tensors(has_experts=bool(own))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    llm = loaded(directory, backend)
    plain = answers(llm, CROSSING, PARAMS)
    chain = {"method": "mtp", "num_speculative_tokens": 6, "fixed": True}
    forms = [chain, chain | {"tree_width": 3}]
    llm.offer([SpeculationConfig.parse(form) for form in forms])
    both = [form for form in forms for _ in CROSSING]
    outputs = llm.generate(CROSSING * 2, PARAMS * 2, speculation=both)
    assert [output.outputs[0].token_ids for output in outputs] == plain * 2
    assert all(output.timings.draft_n > 0 for output in outputs)


def test_a_hybrid_draft_model_is_refused(llm: LLM, path: Path):
    with pytest.raises(RequestError, match="recurrent layers is not supported"):
        llm.offer([SpeculationConfig.parse({"method": "draft_model", "model": str(path)})])
