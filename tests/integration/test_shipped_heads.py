"""The head that comes with the package is given to its model, whatever file that is in, and to no other."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.drafters.heads.loading import head_path
from foreword.engine.drafting.default_speculation import choose_speculation
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads.opening import open_head
from foreword.models.heads.shipped import (
    NORM_TOLERANCE,
    ShippedHead,
    describe_target,
    find_head,
    shipped_heads,
)
from foreword.models.sources.resolve import resolve_model
from helpers.tiny_models import make_hf_model


class Renormed:
    """A checkpoint whose final norm is a little other."""

    def __init__(self, checkpoint: object, factor: float) -> None:
        self._checkpoint, self._factor = checkpoint, factor

    def __getattr__(self, name: str) -> object:
        return getattr(self._checkpoint, name)

    def load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        numbers = self._checkpoint.load(name, dtype)
        return numbers * self._factor if name == "model.norm.weight" else numbers


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[ShippedHead, Path]:
    """A head that says it was trained for a tiny model."""
    import json

    model = make_hf_model(tmp_path / "model", "llama", tied=True)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "target.json").write_text(json.dumps(describe_target(open_checkpoint(model), "eagle3")))
    return ShippedHead("head", folder, "eagle3"), model


def test_norms_may_be_rounded_and_not_more(tiny: tuple[ShippedHead, Path]):
    head, model = tiny
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.tokenizer()
    assert head.fits(checkpoint, tokenizer)
    assert head.fits(Renormed(checkpoint, 1 + NORM_TOLERANCE / 2), tokenizer)
    assert not head.fits(Renormed(checkpoint, 1 + 2 * NORM_TOLERANCE), tokenizer)


def test_another_shape_does_not_get_it(tiny: tuple[ShippedHead, Path], tmp_path: Path):
    head, _ = tiny
    other = open_checkpoint(make_hf_model(tmp_path / "other", "llama", tied=True, num_hidden_layers=3))
    assert not head.fits(other, other.tokenizer())


def test_no_shipped_head_is_given_to_a_stranger(tiny: tuple[ShippedHead, Path]):
    checkpoint = open_checkpoint(tiny[1])
    assert find_head(checkpoint, checkpoint.tokenizer()) is None


def test_every_shipped_head_is_whole_and_described():
    assert [head.name for head in shipped_heads()] == ["qwen2.5-coder-1.5b-eagle3", "smollm2-135m-eagle3"]
    for head in shipped_heads():
        assert resolve_model(head.name) == head.path
        assert open_head(head.path).spec.kind == head.method
        assert (head.path / "model.safetensors").stat().st_size < 16 << 20
        assert "SHA-256" in (head.path / "README.md").read_text()


def test_auto_takes_the_head_where_no_guess_can_change_a_text():
    head = shipped_heads()[0]
    chosen = choose_speculation("auto", is_shape_invariant=True, head=head)
    assert chosen.config is not None
    assert list(chosen.config.method) == ["eagle3", "ngram"]
    assert chosen.config.combine == "route"
    assert choose_speculation("auto", is_shape_invariant=False, head=head).config is None
    assert (
        choose_speculation("auto", is_shape_invariant=True, acceptance_rule="token", head=head).config is None
    )
    assert choose_speculation("off", is_shape_invariant=True, head=head).config is None


@pytest.mark.parametrize(
    "name", ["eagle3+ngram", {"method": "eagle3+ngram"}, {"method": ["eagle3", "ngram"]}]
)
def test_the_name_of_the_default_means_the_default(name: object):
    head = shipped_heads()[0]
    default = choose_speculation("auto", is_shape_invariant=True, head=head).config
    assert choose_speculation(name, is_shape_invariant=False, head=head).config == default


def test_a_setting_that_names_a_head_by_its_method_gets_the_shipped_one():
    head = shipped_heads()[0]
    for setting in ("eagle3", '{"method": "eagle3"}', {"method": "eagle3", "tree_width": 2}):
        config = choose_speculation(setting, is_shape_invariant=False, head=head).config
        assert config is not None
        assert (config.method, dict(config.options)["model"]) == (("eagle3",), head.name)
    own = choose_speculation({"method": "eagle3", "model": "my-head"}, is_shape_invariant=True, head=head)
    assert own.config is not None
    assert dict(own.config.options)["model"] == "my-head"


def test_drafters_find_the_shipped_head_by_themselves(
    tiny: tuple[ShippedHead, Path], monkeypatch: pytest.MonkeyPatch
):
    head, model = tiny
    resources: Any = SimpleNamespace(checkpoint=open_checkpoint(model))
    with pytest.raises(
        RequestError, match=r'eagle3 needs a head, and no head ships .* give .* "model", or train'
    ):
        head_path("", "eagle3", resources)
    monkeypatch.setattr("foreword.models.heads.shipped.shipped_heads", lambda: (head,))
    assert head_path("", "eagle3", resources) == head.path
    with pytest.raises(RequestError, match="medusa needs a head, and the eagle3 head head ships"):
        head_path("", "medusa", resources)


@pytest.mark.model
def test_the_default_model_gets_it_and_it_guesses_well(default_model: Path, tmp_path: Path):
    copy = shutil.copy(default_model, tmp_path / "another-name.gguf")
    checkpoint = open_checkpoint(Path(copy))
    head = find_head(checkpoint, checkpoint.tokenizer())
    assert head is not None
    form = {"method": head.method, "num_speculative_tokens": 4, "fixed": True}  # finds the head by itself
    llm = LLM(str(copy), speculation=form)
    greedy = SamplingParams(temperature=0, max_tokens=48)
    messages = [
        {"role": "user", "content": "Write a Python function that adds two numbers, with an example."}
    ]
    guessed = llm.chat(messages, greedy)
    llm.speculate(None)
    plain = llm.chat(messages, greedy)
    guessed, plain = (found[0] if isinstance(found, list) else found for found in (guessed, plain))
    assert guessed.outputs[0].token_ids == plain.outputs[0].token_ids
    passes = len(plain.outputs[0].token_ids) - guessed.timings.draft_n_accepted
    assert len(plain.outputs[0].token_ids) / passes > 2, (
        "tokens per pass on code were 2.9 when it was trained"
    )
