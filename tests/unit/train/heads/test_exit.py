"""Early exits learn to say what the layers above would."""

from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.model.layer_skip import open_adapter
from foreword.engine.llm import LLM
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.heads.decoders import ExitRecipe
from foreword.train.heads.learner import full_vocabulary
from foreword.train.loop.output import write_output
from foreword.train.passes.packing import exact_size, pack
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.passes.target import wide_logits
from foreword.train.texts.documents import Document
from helpers.cpu import cpu_decoder
from helpers.passes import all_logits, torch_decoder
from helpers.tiny_models import make_hf_model
from helpers.tiny_training import new_learner, trained


def test_tokens_per_pass_rise(target: PlainTarget, documents: list[Document]):
    # Of two layers the exit begins as the second, which leaves nothing to learn.
    _, before, after = trained(
        ExitRecipe(layer=1), target, documents, steps=50, prepare=lambda learner: learner.begin_random(0)
    )
    assert after > before + 0.35, (before, after)


@pytest.mark.parametrize("layer", [0, 2, 9])
def test_an_exit_must_leave_some_layers(layer: int, target: PlainTarget):
    with pytest.raises(RequestError, match="the exit must be after layer"):
        ExitRecipe(layer).build(target, full_vocabulary(target.config.vocab_size))


def test_an_exit_after_all_but_one_layer_can_be_the_target(
    target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    """Begun as the target's last layer it says what the target says, so that every guess is accepted."""
    learner = new_learner(ExitRecipe(target.config.num_layers - 1), target, documents)
    write_output(tmp_path / "exit", learner.files(open_checkpoint(tiny_model), 3))
    config = {
        "method": "layer_skip",
        "adapter": str(tmp_path / "exit"),
        "num_speculative_tokens": 3,
        "fixed": True,
    }
    for backend in ("torch", "cpu"):
        llm = LLM(str(tiny_model), device="cpu", backend=backend, dtype="float32", speculation=config)
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        stats = llm.generate([5, 6, 7], params)[0].outputs[0].stats
        assert stats is not None and stats.accepted > 0.9 * stats.drafted > 0, backend
        llm.close()


def test_an_exit_of_another_model_is_refused(
    target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    learner = new_learner(ExitRecipe(1), target, documents)
    write_output(tmp_path / "exit", learner.files(open_checkpoint(tiny_model), 3))
    other = open_checkpoint(make_hf_model(tmp_path / "other", "llama", hidden_size=32))
    with pytest.raises(RequestError, match="exit adapter of another model"):
        open_adapter(str(tmp_path / "exit"), other)


@pytest.mark.parametrize(
    "keys", [{"adapter": 7}, {"adapter": "x", "exit_layer": 2}, {"adapter": "x", "layers": [0]}]
)
def test_an_adapter_is_a_directory_and_knows_its_layer(keys: dict[str, object]):
    with pytest.raises(RequestError, match="adapter"):
        SpeculationConfig.parse({"method": "layer_skip", **keys})


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_decoders_run_an_exit_as_it_was_trained(
    backend: str, target: PlainTarget, documents: list[Document], tiny_model: Path, tmp_path: Path
):
    learner = new_learner(ExitRecipe(1), target, documents)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in learner.parameters():  # its own in everything, the norm included
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            parameter.copy_(parameter.bfloat16())
    checkpoint = open_checkpoint(tiny_model)
    write_output(tmp_path / "exit", learner.files(checkpoint, 3))
    whole = torch_decoder(tiny_model) if backend == "torch" else cpu_decoder(tiny_model, "float32", 1)
    adapter = open_adapter(str(tmp_path / "exit"), checkpoint)
    text = documents[:1]
    logits = all_logits(whole.with_layers([0]).followed_by(adapter), text[0].tokens.tolist())
    batch = pack(text, exact_size(text), target.device)
    rows = (batch.tail_rows + 1).clamp(max=len(logits) - 1)
    states = next(learner.steps(batch, target.features(batch, learner.taps), 1))
    torch.testing.assert_close(wide_logits(states, learner.output(0)), logits[rows], rtol=1e-3, atol=1e-3)
