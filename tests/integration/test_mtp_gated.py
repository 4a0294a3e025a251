"""MTP modules as Qwen3-Next and Qwen3.5 have them: gated attention and norms stored less one, perhaps with experts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from foreword import LLM, SamplingParams
from helpers.cpu import needs_cpu_kernels
from helpers.gated_modules import (
    CONFIG,
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    OURS,
    module_tensors,
)
from helpers.overheard import OverheardLevels
from helpers.slow_heads import SlowHead, rms, target_states, turned
from helpers.taught_heads import hf_target
from helpers.tiny_models import make_hf_model

PROMPT = {"prompt_token_ids": [*range(20, 36), 7]}


@dataclass(frozen=True)
class SlowGated(SlowHead):
    """Such a module of float64 tensors, written down directly."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, 1 + self.tensors[name].double(), self.config["rms_norm_eps"])

    def layer(self, index: int, stream: Tensor, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        stream = stream + self.attention(read, positions, seen)
        inner = self.norm(stream, "layers.0.post_attention_layernorm.weight")
        if "layers.0.mlp.gate.weight" not in self.tensors:
            return stream + self.mlp(inner, "layers.0.mlp")
        return stream + torch.stack([self.mixture(row) for row in inner])

    def attention(self, read: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        part, prefix = DIM // 4, "layers.0.self_attn."
        both = self.linear(read, prefix + "q_proj").view(len(read), HEADS, 2, DIM)
        rows = {"q": both[:, :, 0]}
        rows |= {name: self.linear(read, f"{prefix}{name}_proj").view(-1, KV_HEADS, DIM) for name in "kv"}
        for name in "qk":
            x = self.norm(rows[name], f"{prefix}{name}_norm.weight")
            begin = turned(x[..., :part], positions, self.config["rope_theta"])
            rows[name] = torch.cat((begin, x[..., part:]), -1)
        keys, values = (rows[name].repeat_interleave(HEADS // KV_HEADS, dim=1) for name in "kv")
        scores = torch.einsum("ihd,jhd->hij", rows["q"], keys) / DIM**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, values) * both[:, :, 1].sigmoid()
        return self.linear(mixed.flatten(1), prefix + "o_proj")

    def mixture(self, row: Tensor) -> Tensor:
        scores = self.linear(row, "layers.0.mlp.gate").softmax(-1)
        taken = scores.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
        total = sum(float(scores[expert]) for expert in taken)
        open_by = self.linear(row, "layers.0.mlp.shared_expert_gate").sigmoid()
        said = open_by * self.mlp(row, "layers.0.mlp.shared_expert")
        for expert in taken:
            said = said + float(scores[expert]) / total * self.mlp(row, f"layers.0.mlp.experts.{expert}")
        return said

    def mlp(self, row: Tensor, name: str) -> Tensor:
        gate, up = (self.linear(row, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{name}.down_proj")


def by_the_book(stored: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> SlowGated:
    tensors = dict(ends)
    for name, tensor in stored.items():
        part, _, kind = name.removeprefix("mtp.").rpartition(".")
        tensors[f"{OURS.get(part, part)}.{kind}"] = tensor
    return SlowGated(tensors, CONFIG | {"num_hidden_layers": 1}, {"fused": True, "norm_output": True})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("gated") / "target", num_hidden_layers=LAYERS, tied=False)


def write_module(path: Path, has_experts: bool) -> dict[str, Tensor]:
    path.mkdir()
    tensors = module_tensors(has_experts)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return tensors


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_what_a_gated_module_says_is_what_it_should(
    target: Path, tmp_path: Path, has_experts: bool, backend: str
):
    tensors = write_module(tmp_path / "module", has_experts)
    stored = load_file(target / "model.safetensors")
    ends = {
        "embed_tokens.weight": stored["model.embed_tokens.weight"],
        "lm_head.weight": stored["lm_head.weight"],
    }
    slow, model = by_the_book(tensors, ends), hf_target(target)
    form = {"method": "mtp", "model": str(tmp_path / "module"), "num_speculative_tokens": 3, "fixed": True}
    llm = LLM(str(target), dtype="float32", device="cpu", backend=backend, speculation=form)
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardLevels(guard._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert not guard.faults
    assert len(overheard.found) >= 6
    for text, guesses, logits in overheard.found:
        states = target_states(model, text[:-1], (LAYERS,), normed=True)
        expected = slow.chain(text, states, guesses, 1)[-1]
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)


def test_the_book_s_attention_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        **{key: value for key, value in CONFIG.items() if key != "architectures"},
        layer_types=["full_attention"] * LAYERS,
        attn_implementation="eager",
    )
    stored, place = module_tensors(has_experts=False), "mtp.layers.0.self_attn."
    theirs = modeling.Qwen3NextAttention(config, 0)
    own = {name.removeprefix(place): tensor for name, tensor in stored.items() if name.startswith(place)}
    theirs.load_state_dict(own)
    read, positions = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(1)), torch.arange(9)
    seen = torch.ones(9, 9).tril().bool()
    mask = torch.zeros(9, 9).masked_fill(~seen, -torch.inf)[None, None]
    with torch.no_grad():
        turns = modeling.Qwen3NextRotaryEmbedding(config)(read, positions[None])
        found = theirs(read, turns, mask)[0]
    expected = by_the_book(stored, {}).attention(read[0].double(), positions, seen)
    torch.testing.assert_close(found[0].double(), expected, atol=1e-5, rtol=1e-5)
