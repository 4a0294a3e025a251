"""Every drafter on the embedded default model: the text of plain decoding, token for token."""

from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.kernels.native import native_status

pytestmark = pytest.mark.model

FORMS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 6, "fixed": True},
    {"method": "layer_skip", "num_speculative_tokens": 8, "fixed": True, "exit_layer": 20, "tree_width": 3},
    {"method": ["suffix", "layer_skip"], "num_speculative_tokens": 10, "fixed": True, "combine": "merge"},
]
MORE_FORMS: list[dict[str, Any]] = [
    {"method": "self_quantized", "num_speculative_tokens": 3, "fixed": True, "bits": 4},
    {"method": "suffix", "num_speculative_tokens": 12, "fixed": True},
    {"method": "layer_skip", "num_speculative_tokens": 3, "fixed": True, "exit_layer": 10},
    {"method": "self_quantized", "num_speculative_tokens": 8, "fixed": True, "bits": 3, "tree_width": 2},
]
"""Which `test_same_seed_same_text.py` has, too."""

PROMPTS = [
    "Repeat this sentence five times: the cat sat on the mat.",
    "Count from 1 to 30.",
    "Why is the sky blue?",
    "def quicksort(values):",
    "Translate to French: Good morning, how are you today?",
    "Extract the names: Alice met Bob and Carol in Paris.",
    "Summarise: The sun rose. The birds sang. The sun warmed the field. The birds sang on.",
    "Write a short poem about the sea.",
]


@pytest.fixture(scope="module")
def llm(default_model: Path) -> LLM:
    if not native_status().available:
        pytest.skip("the CPU kernels are not here; on torch a near tie may fall either way")
    return LLM(str(default_model), device="cpu", backend="cpu")


def texts(llm: LLM, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """The first half greedy, the second sampled, each prompt with its own seed, all in one batch."""
    params = [
        SamplingParams(
            temperature=0 if 2 * i < len(prompts) else 0.8,
            top_p=0.95,
            seed=i,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    llm.speculate(None)
    return texts(llm, PROMPTS[::2], 12)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_4_prompts_of_12_tokens(llm: LLM, plain: list[list[int]], form: dict[str, Any]):
    llm.speculate(form)
    assert texts(llm, PROMPTS[::2], 12) == plain


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS + MORE_FORMS, ids=lambda form: "-".join(map(str, form.values())))
def test_50_prompts_of_128_tokens(llm: LLM, form: dict[str, Any]):
    prompts = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(50)]
    llm.speculate(None)
    expected = texts(llm, prompts, 128)
    llm.speculate(form)
    assert texts(llm, prompts, 128) == expected
