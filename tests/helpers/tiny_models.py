"""Tiny random models that tests make for themselves, as Hugging Face directories and as GGUF files."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from helpers.tiny_gguf import write_gguf

__all__ = [
    "CHATML_TEMPLATE",
    "SPECIAL_TOKENS",
    "TINY_VOCAB",
    "make_hf_model",
    "tiny_tokenizer_json",
    "write_gguf",
    "write_tiny_tokenizer",
]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens of the tiny tokenizer, with ids 0, 1 and 2."""

TINY_VOCAB = 360
"""Entries of the tiny tokenizer: control tokens, 256 bytes, and merges."""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The sky is blue because the air scatters short waves more than long ones.",
    "def add(first, second):\n    return first + second\n",
    "She sells sea shells by the sea shore; the shells she sells are sea shells, I am sure.",
    "In 1999 and 2024 the numbers 10, 200 and 3000 were written on the wall.",
    "the then there these they this that those other another",
)

_TRANSFORMERS_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "llama3": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


@cache
def tiny_tokenizer_json() -> str:
    """tokenizer.json of a small byte-level BPE that splits digits, as SmolLM2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB
    return tokenizer.to_str()


def write_tiny_tokenizer(directory: Path, chat_template: str | None = CHATML_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json of the tiny tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_hf_model(
    directory: Path,
    architecture: str = "llama",
    *,
    tied: bool = True,
    seed: int = 0,
    max_shard_size: str | int = "50GB",
    **overrides: Any,
) -> Path:
    """Save a tiny random model and its tokenizer with transformers; `overrides` go into its config.

    `architecture` is "llama", "llama3" (llama3 rope scaling), "mistral", "qwen2" or "qwen3".
    """
    import transformers

    config_name, model_name = _TRANSFORMERS_CLASSES[architecture]
    settings = _base_settings(architecture, tied) | overrides
    config = getattr(transformers, config_name)(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        _randomize(model)
    directory.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tiny_tokenizer(directory)
    return directory


def _base_settings(architecture: str, tied: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if architecture == "llama3":
        settings["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if architecture == "mistral":
        settings["sliding_window"] = None
    if architecture == "qwen3":
        settings["head_dim"] = 32
    return settings


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Give every parameter, norms and biases too, a value that a loader cannot get right by default."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
