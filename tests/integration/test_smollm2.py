"""The embedded default model against transformers on the same weights.

Transformers takes half a minute to read them. The slow tests have it do so, and compare all numbers; the others compare
with some that were written down then.
"""

from pathlib import Path

import pytest
import torch

from foreword import LLM, SamplingParams
from helpers.passes import all_logits

pytestmark = pytest.mark.model

PROMPTS = [
    "Explain why the sky is blue.",
    "Write a haiku about rain.",
    "List five fruits and their colours.",
    "def fibonacci(n):",
    "Translate to French: Good morning, my friend.",
    "What is 17 + 25?",
    "Summarise: The cat sat on the mat. The mat was red. The cat was black.",
    "Tell me a joke about computers.",
    "Who wrote Hamlet?",
    "Count from 1 to 20.",
    "Describe the taste of an orange to someone who has never eaten one.",
    "Give three tips for learning to swim.",
    "Repeat the word 'echo' ten times.",
    "What is the capital of Japan? 日本の首都は?",
    "Write a JSON object with a name and an age.",
    "Why do leaves fall in autumn?",
    "Continue: Once upon a time, in a village by the sea,",
    "Explain recursion in one sentence.",
    "Sort these numbers: 9, 3, 7, 1.",
    "Thank you! 🙂 What should I cook tonight?",
]


CONTINUED = {
    "Explain why the sky is blue.": [504, 6376, 314, 4461, 30, 657, 506, 253, 4959, 1909, 281, 2092],
    "def fibonacci(n):": [504, 24681, 46477, 5972, 314, 253, 8170, 1183, 282, 253, 35881, 5972],
    "Who wrote Hamlet?": [504, 41404, 506, 1038, 4132, 28, 4967, 12081, 28, 34774, 260, 13329],
    "Continue: Once upon a time, in a village by the sea,": [
        *(788, 253, 6560, 411, 260, 3426, 28, 665, 436, 253, 6560, 282)
    ],
}
"""By prompt, what transformers goes on with; its best token is always at least 0.09 before the second."""

BEST_LOGITS = [
    {260: 11.9421, 338: 11.0222, 282: 10.8812},
    {5275: 39.1772, 28213: 34.223, 39064: 32.9781},
    {355: 20.254, 284: 19.5147, 327: 16.6903},
    {18772: 24.8204, 6319: 23.8315, 441: 23.4145},
    {282: 28.2962, 355: 21.8032, 22410: 20.2963},
    {282: 22.9573, 3914: 22.4302, 472: 21.2854},
    {19015: 20.1875, 257: 19.2232, 6843: 18.2973},
    {44916: 29.2251, 380: 25.7411, 404: 23.4813},
]
MEAN_LOGITS = [-5.298, 12.7026, 0.2483, 8.5568, 3.2338, 1.9963, -1.568, 1.0714]
"""Transformers' logits after every 32nd token of a long text: the best three, and the mean of all."""


@pytest.fixture(scope="module")
def llm(default_model: Path) -> LLM:
    return LLM(str(default_model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def reference(default_model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    ).eval()


@torch.inference_mode()
def reference_logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return reference(torch.tensor([ids])).logits[0]


def long_text(llm: LLM, start: int) -> list[int]:
    licence = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
    text = llm.tokenizer.encode(licence)[start : start + 256]
    assert len(text) == 256
    return text


def check_written_down(logits: torch.Tensor) -> None:
    rows = logits[31::32]
    for found, best in zip(rows, BEST_LOGITS, strict=True):
        assert found.topk(3).indices.tolist() == list(best)
        assert found[list(best)].tolist() == pytest.approx(list(best.values()), abs=2e-3)
    assert rows.mean(1).tolist() == pytest.approx(MEAN_LOGITS, abs=2e-3)


def test_logits_are_those_of_transformers(llm: LLM):
    check_written_down(all_logits(llm.engine.target, long_text(llm, 500)))


@pytest.mark.slow
def test_what_is_written_down_is_what_transformers_says(llm: LLM, reference: torch.nn.Module):
    check_written_down(reference_logits(reference, long_text(llm, 500)))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 500, 1100])
def test_logits_equal_transformers_on_long_texts(llm: LLM, reference: torch.nn.Module, start: int):
    text = long_text(llm, start)
    ours = all_logits(llm.engine.target, text)
    torch.testing.assert_close(ours, reference_logits(reference, text), atol=1e-3, rtol=0)


def check_greedy(llm: LLM, reference: torch.nn.Module, prompts: list[str], max_tokens: int) -> None:
    """Every token of ours must be the reference's best after the same text, so the two texts are equal.

    A step whose two best logits are closer than 1e-3 may differ; such steps are listed.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    near_ties = []
    for output in llm.generate(prompts, params):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == max_tokens
        logits = reference_logits(reference, prompt + answer)[len(prompt) - 1 : -1]
        best = logits.topk(2)
        for step in range(max_tokens):
            if answer[step] != best.indices[step, 0]:
                gap = float(best.values[step, 0] - logits[step, answer[step]])
                assert gap < 1e-3, f"{output.prompt!r}, step {step}: {gap} below the best"
                near_ties.append((output.prompt, step, gap))
    print("near ties:", near_ties)


def test_greedy_continuations_are_those_of_transformers(llm: LLM):
    """48 steps of decoding; what a step computes from is compared number by number above."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(list(CONTINUED), params)
    assert [output.outputs[0].token_ids for output in outputs] == list(CONTINUED.values())


@pytest.mark.slow
def test_long_greedy_continuations_equal_transformers(llm: LLM, reference: torch.nn.Module):
    check_greedy(llm, reference, PROMPTS, 64)


def test_several_prompts_at_once_give_what_each_gives_alone(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=8)
    together = llm.generate(PROMPTS[:3], params)
    for prompt, output in zip(PROMPTS[:3], together, strict=True):
        alone = llm.generate(prompt, params)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.slow
def test_resident_memory_in_float32(default_model: Path):
    """Loading and answering in a process of its own stays under 1.3 GB; the default form's is in test_cpu_decoder."""
    import subprocess
    import sys

    program = (
        "import sys\nfrom foreword import LLM, SamplingParams\n"
        "from foreword.bench.peers import peak_resident_bytes\n"
        "LLM(sys.argv[1], dtype='float32', device='cpu').generate('Hi', SamplingParams(max_tokens=4))\n"
        "print(peak_resident_bytes())\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(default_model)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 1.3e9
