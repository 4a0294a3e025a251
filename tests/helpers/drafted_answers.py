"""What drafters of a tiny model are tried on: prompts, parameters, another model, a datastore."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.drafters.datastore.build import build

PROMPTS = [
    {"prompt_token_ids": [7]},
    {"prompt_token_ids": [20, 21, 22, 23] * 12},
    {"prompt_token_ids": [50] * 30},
    {"prompt_token_ids": list(range(30, 90))},
    {"prompt_token_ids": [5, 9] * 3 + list(range(100, 130)) + [5, 9]},
    {"prompt_token_ids": list(range(3, 3 + 340)) + list(range(3, 3 + 165))},
]


def mixed_params(count: int, max_tokens: int = 24) -> list[SamplingParams]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
        {"temperature": 0.3, "repetition_penalty": 1.3},
    ]
    return [
        SamplingParams(
            **kinds[i % len(kinds)], max_tokens=max_tokens, seed=rng.getrandbits(32), ignore_eos=i % 2 == 0
        )
        for i in range(count)
    ]


def answers(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], expected: Any = None
) -> list[list[int]]:
    outputs = llm.generate(list(prompts), list(params), prediction=expected)
    return [output.outputs[0].token_ids for output in outputs]


def noisy_copy(model: Path, path: Path) -> Path:
    """A model with noise on its weights: like it, but not it."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor.add_(0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def store_of_answers(llm: LLM, path: Path) -> Path:
    """A datastore of what the model says to some prompts, among many tokens that mean nothing, in several shards."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.speculate(None)
    told = answers(llm, PROMPTS[:4], [greedy] * 4)
    noise = np.random.default_rng(4).integers(3, 300, 3000)
    texts = [*(prompt["prompt_token_ids"] + text for prompt, text in zip(PROMPTS, told, strict=False)), noise]
    files = [path / f"{number}.npy" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        np.save(file, np.array(text, np.uint16))
    build(files, path / "answers.store", llm.tokenizer, "tiny", lambda *_: None, shard_tokens=1000)
    return path / "answers.store"
