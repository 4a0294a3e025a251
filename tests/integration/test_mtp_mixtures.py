"""MTP modules as DeepSeek-V3 and GLM-4.5 have them, with experts and with latent attention, by the book."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.models.heads import mtp
from foreword.models.heads.opening import open_head
from helpers.cpu import needs_cpu_kernels
from helpers.cuda import needs_cuda
from helpers.overheard import OverheardLevels
from helpers.slow_heads import target_states
from helpers.slow_modules import SlowModule, module_tensors
from helpers.taught_heads import hf_target
from helpers.tiny_families import change_config, make_family

PROMPT = {"prompt_token_ids": [*range(20, 36), 7]}  # a page and a token
THETA = 1e4
ROPE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5},
    "deepseek_v3": {"rope_type": "default", "rope_theta": THETA},
}
OTHER_NAMES = {"eh_proj": "fc", "shared_head.norm": "norm", "enorm": "enorm", "hnorm": "hnorm"}


def target_with_module(path: Path, family: str) -> tuple[Any, SlowModule]:
    """A checkpoint with a module behind its layers: its target in transformers, and the module by the book."""
    _, model = make_family(path, family, rope_parameters=ROPE[family], max_position_embeddings=256)
    config = json.loads((path / "config.json").read_text()) | ROPE[family]
    own = module_tensors(config, torch.Generator().manual_seed(3))
    stored = load_file(path / "model.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    save_file(stored | {prefix + name: t for name, t in own.items()}, path / "model.safetensors")
    change_config(path, num_nextn_predict_layers=1)
    tensors = {}
    for name, tensor in own.items():
        part, _, kind = name.rpartition(".")
        tensors[f"{OTHER_NAMES.get(part, 'layers.0.' + part)}.{kind}"] = tensor
    tensors["embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = stored["lm_head.weight"]
    flags = {"fused": True, "norm_output": True}
    return model, SlowModule(tensors, config | {"num_hidden_layers": 1}, flags)


@pytest.mark.parametrize(
    ("family", "backend", "width"),
    [
        ("glm4_moe", "torch", 1),
        pytest.param("glm4_moe", "cpu", 2, marks=needs_cpu_kernels),
        ("deepseek_v3", "torch", 2),
        pytest.param("deepseek_v3", "cpu", 1, marks=needs_cpu_kernels),
        pytest.param("glm4_moe", "cuda", 1, marks=needs_cuda),
        pytest.param("deepseek_v3", "cuda", 2, marks=needs_cuda),
    ],
)
def test_what_a_module_says_is_what_it_should(tmp_path: Path, family: str, backend: str, width: int):
    model, slow = target_with_module(tmp_path, family)
    form = {"method": "mtp", "num_speculative_tokens": 3 * width, "max_depth": 3, "tree_width": width}
    device = "cuda" if backend == "cuda" else "cpu"
    llm = LLM(
        str(tmp_path), dtype="float32", device=device, backend=backend, speculation=form | {"fixed": True}
    )
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardLevels(guard._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert not guard.faults
    assert len(overheard.found) >= 6
    layers = len(model.model.layers)
    for text, guesses, logits in overheard.found:
        states = target_states(model, text[:-1], (layers,), normed=True)
        expected = slow.chain(text, states, guesses, 1)[-1]
        torch.testing.assert_close(logits.double().cpu(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_book_says_what_transformers_says(tmp_path: Path, family: str):
    """Its own reading of the same files, where it has the module."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this version of transformers has no MTP modules")
    from transformers.cache_utils import MtpCache

    model, slow = target_with_module(tmp_path, family)
    theirs = hf_target(tmp_path)
    behind = rf"model\.layers\.{len(model.model.layers)}\."  # it knows the depths of published models alone
    theirs._keys_to_ignore_on_load_unexpected = [behind]
    module = layers.MtpModel.from_pretrained(theirs)
    text = [*range(20, 36), 7, 9]
    states = target_states(model, text[:-1], (len(model.model.layers),), normed=True)
    with torch.no_grad():
        _, logits, _ = module(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=states[None].float(),
            attention_mask=torch.ones(1, len(text) - 1, dtype=torch.long),
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=theirs.config.get_mtp_config()),
        )
    expected = slow.chain(text, states, [], 1)[-1]
    torch.testing.assert_close(logits[0, -1].double(), expected, atol=2e-4, rtol=1e-4)


def test_a_module_in_8_bit_floats_is_unpacked(tmp_path: Path):
    """As DeepSeek publishes its own: blocks with a scale each."""
    target_with_module(tmp_path, "deepseek_v3")
    plain = open_head(tmp_path, "mtp")
    name = "layers.0.mlp.experts.1.up_proj.weight"
    expected = plain.load(name)
    stored = load_file(tmp_path / "model.safetensors")
    place = f"model.{name.replace('layers.0', 'layers.2')}"
    scales = torch.tensor([[2.0, 0.5, 4.0, 1.0], [0.25, 8.0, 1.0, 2.0]])
    wide = scales.repeat_interleave(16, 0)[:24].repeat_interleave(16, 1)
    stored[place] = (expected / wide).to(torch.float8_e4m3fn)
    stored[place + "_scale_inv"] = scales
    save_file(stored, tmp_path / "model.safetensors")
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    head = open_head(tmp_path, "mtp")
    assert torch.equal(head.load(name), stored[place].float() * wide)
    torch.testing.assert_close(head.load(name), expected, rtol=0.07, atol=0.03)
    change_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="scales of an unknown form"):
        open_head(tmp_path, "mtp").load(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_routed_experts": 10**9}, "layer 0 has 8 experts and not 1000000000"),
        ({"n_routed_experts": "eight"}, "n_routed_experts"),
        ({"kv_lora_rank": 24}, "its config says"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, not even"),
        ({"architectures": ["NovelForCausalLM"]}, "NovelForCausalLM"),
        ({"num_hidden_layers": 10**9}, ""),
    ],
)
def test_a_damaged_config_costs_one_line(tmp_path: Path, changes: dict[str, Any], words: str):
    target_with_module(tmp_path, "deepseek_v3")
    change_config(tmp_path, **changes)
    if not words:
        assert open_head(tmp_path, "mtp").spec.layers[0].mlp.experts is not None
        return
    with pytest.raises(CheckpointError, match=words) as caught:
        open_head(tmp_path, "mtp")
    assert "\n" not in str(caught.value)


def test_experts_that_are_not_there_are_missed_before_they_cost_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target_with_module(tmp_path, "deepseek_v3")
    change_config(tmp_path, n_routed_experts=10**9)

    def never(*_: object) -> None:
        raise AssertionError("the shapes of a billion experts are made")

    monkeypatch.setattr(mtp, "layer_shapes", never)
    with pytest.raises(CheckpointError, match="layer 0 has 8 experts and not 1000000000"):
        open_head(tmp_path, "mtp")
