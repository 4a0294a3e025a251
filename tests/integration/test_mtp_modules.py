"""MTP modules inside of the target's own checkpoint: their mathematics, and those that cannot be run yet."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.errors import ForewordError
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardLevels
from helpers.slow_heads import SlowHead, target_states
from helpers.taught_heads import hf_target
from helpers.tiny_heads import HIDDEN, TinyHead
from helpers.tiny_models import make_hf_model

LAYERS, VOCAB = 6, 360
PROMPT = {"prompt_token_ids": [*range(20, 60), 7]}


def mtp_names(layout: str, layers: int) -> tuple[str, dict[str, str]]:
    """A module's prefix and how its parts are called, where that is not DeepSeek's name."""
    mimo = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "shared_head.norm": "final_layernorm",
    }
    return ("model.mtp_layers.0.", mimo) if layout == "MiMo" else (f"model.layers.{layers}.", {})


def target_with_module(path: Path, layout: str, head: TinyHead) -> Path:
    """A checkpoint of the dense family with its MTP module inside."""
    make_hf_model(path, "qwen2", num_hidden_layers=LAYERS, tied=False)
    tensors = load_file(path / "model.safetensors")
    prefix, names = mtp_names(layout, LAYERS)
    for name, tensor in head.tensors.items():
        part, _, kind = name.rpartition(".")
        tensors[f"{prefix}{names.get(part, part)}.{kind}"] = tensor.contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    if layout == "MiMo":
        config["architectures"] = ["MiMoForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("layout", ["MiMo", "DeepSeek"])
def test_the_target_s_own_mtp_module(tmp_path: Path, layout: str, pre_norm: bool, backend: str):
    head = TinyHead(VOCAB, bias=True).mtp()
    path = target_with_module(tmp_path / "target", layout, head)
    plain = make_hf_model(tmp_path / "plain", "qwen2", num_hidden_layers=LAYERS, tied=False)
    model = hf_target(plain)
    names = {"eh_proj": "fc", "shared_head.norm": "norm", "enorm": "enorm", "hnorm": "hnorm"}
    tensors = {
        f"{names.get(name.rpartition('.')[0], 'layers.0.' + name.rpartition('.')[0])}.{name.rpartition('.')[2]}": t
        for name, t in head.tensors.items()
    }
    tensors["embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
    tensors["lm_head.weight"] = model.lm_head.weight.detach()
    config = json.loads((plain / "config.json").read_text())
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    flags = {"fused": True, "norm_output": True, "hidden_first": layout == "MiMo"}
    slow = SlowHead(tensors, {**config, "num_hidden_layers": 1, "rope_theta": theta}, flags)
    form = {"method": "mtp", "num_speculative_tokens": 3, "fixed": True, "pre_norm": pre_norm}
    llm = LLM(str(path), dtype="float32", device="cpu", backend=backend, speculation=form)
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardLevels(guard._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert not guard.faults
    assert len(overheard.found) >= 12
    for text, guesses, logits in overheard.found:
        states = target_states(model, text[:-1], (LAYERS,), normed=not pre_norm)
        expected = slow.chain(text, states, guesses, 1)[-1]
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp.gate.weight": (4, HIDDEN)}, "unknown tensor layers.0.mlp.gate.weight"),
        ({"self_attn.qkv_proj.weight": (8, HIDDEN)}, "one matrix for queries, keys and values"),
        ({"self_attn.q_proj.weight": (2 * HIDDEN, HIDDEN)}, "lacks tensor layers.0.self_attn.k_norm.weight"),
        ({"extra.weight": (4,)}, "unknown tensor layers.0.extra.weight"),
        (None, "holds no MTP module"),
    ],
)
def test_modules_that_cannot_run_are_refused_in_one_line(
    tmp_path: Path, change: dict[str, tuple[int, ...]] | None, message: str
):
    head = TinyHead(VOCAB, bias=True).mtp()
    for name, shape in (change or {}).items():
        head.tensors[name] = torch.zeros(shape)
    path = target_with_module(tmp_path / "target", "DeepSeek", head)
    if change is None:
        shutil.rmtree(path)
        make_hf_model(path, "qwen2", num_hidden_layers=LAYERS)
    llm = LLM(str(path), dtype="float32", device="cpu", backend="torch", speculation=None)
    with pytest.raises(ForewordError, match=message) as caught:
        llm.speculate({"method": "mtp"})
    assert "\n" not in str(caught.value)
