"""MiMo by the book: transformers does not have it, so its layers and its MTP module are written down here."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardLevels
from helpers.passes import all_logits
from helpers.slow_heads import SlowHead
from helpers.tiny_families import change_config, make_family
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import TINY_VOCAB
from helpers.trees import random_tokens

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2
CONFIG = {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
}
PUBLISHED = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
"""What a module's parts are called in MiMo's files; the rest of a layer has the usual names."""


class SlowMimo(SlowHead):
    """The whole model in float64, every row computed anew."""

    def states(self, tokens: list[int]) -> torch.Tensor:
        """After the final norm."""
        stream = self.tensors["embed_tokens.weight"].double()[tokens]
        positions, seen = torch.arange(len(tokens)), torch.ones(len(tokens), len(tokens)).tril().bool()
        for index in range(LAYERS):
            read = self.norm(stream, f"layers.{index}.input_layernorm.weight")
            stream = self.layer(index, stream, read, positions, seen)
        return self.norm(stream, "norm.weight")

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.states(tokens) @ self.tensors["lm_head.weight"].double().T


def published(path: Path) -> tuple[SlowMimo, SlowHead]:
    """A checkpoint in MiMo's layout: the model and its module by the book."""
    rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]}
    make_family(path, "mimo", head_dim=DIM, rope_parameters=rope, max_position_embeddings=256)
    own = TinyHead(TINY_VOCAB, bias=True, seed=5).mtp().tensors
    stored = load_file(path / "model.safetensors")
    for name, tensor in own.items():
        part, _, kind = name.rpartition(".")
        fitted = tensor
        if part.startswith("mlp."):  # the model's own width
            fitted = tensor[:, :48] if part.endswith("down_proj") else tensor[:48]
        stored[f"model.mtp_layers.0.{PUBLISHED.get(part, part)}.{kind}"] = fitted.contiguous()
    save_file(stored, path / "model.safetensors")
    change_config(path, num_nextn_predict_layers=1)
    model = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    ours = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "fc",
        "final_layernorm": "norm",
    }
    module = {name: model[name] for name in ("embed_tokens.weight", "lm_head.weight")}
    for name, tensor in model.items():
        if name.startswith("mtp_layers.0."):
            part, _, kind = name.removeprefix("mtp_layers.0.").rpartition(".")
            module[f"{ours.get(part, 'layers.0.' + part)}.{kind}"] = tensor
    flags = {"fused": True, "norm_output": True, "hidden_first": True}
    return SlowMimo(model, CONFIG, {}), SlowHead(module, CONFIG | {"num_hidden_layers": 1}, flags)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_logits_and_module_by_the_book(tmp_path: Path, backend: str):
    model, module = published(tmp_path)
    form = {"method": "mtp", "num_speculative_tokens": 3, "fixed": True}
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", backend=backend, speculation=form)
    ids = random_tokens(random.Random(8), 60)
    expected = model.logits(ids)
    found = all_logits(llm.engine.target, ids).double()
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardLevels(guard._drafter)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": ids[:30]}, params)
    assert not guard.faults
    text = [*ids[:30], *answer.outputs[0].token_ids]
    assert text[30:] == model.logits(text)[29:-1].argmax(-1).tolist()
    assert len(overheard.found) >= 12
    for tokens, guesses, logits in overheard.found:
        said = module.chain(tokens, model.states(tokens[:-1]), guesses, 1)[-1]
        torch.testing.assert_close(logits.double(), said, atol=2e-4, rtol=1e-4)


def test_the_module_is_no_layer_of_the_decoder(tmp_path: Path):
    published(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.num_layers == LAYERS
    assert not any("mtp" in name for name in checkpoint.tensor_names())
