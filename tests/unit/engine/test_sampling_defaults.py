import json
import shutil
from pathlib import Path

import pytest

from foreword.acceptance.params import SamplingDefaults, SamplingParams
from foreword.engine.loader import sampling_defaults
from foreword.errors import CheckpointError, RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.tiny_models import write_gguf


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def write(model: Path, **values: object) -> None:
    (model / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")


def test_a_hugging_face_directory_recommends_what_its_generation_config_says(model: Path):
    write(
        model, temperature=0.6, top_p=0.95, top_k=20, do_sample=True, eos_token_id=2, min_p=None, max_length=9
    )
    found = sampling_defaults(open_checkpoint(model))
    assert found.values == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"
    assert found.params(temperature=0.0, top_p=None) == SamplingParams(temperature=0.0, top_p=0.95, top_k=20)
    assert sampling_defaults(open_checkpoint(model), "none").params() == SamplingParams()


def test_a_gguf_file_recommends_what_its_metadata_says(model: Path, tmp_path: Path):
    keys = {
        "general__sampling__temp": 0.7,
        "general__sampling__top_k": 40,
        "general__sampling__penalty_repeat": 1.1,
    }
    found = sampling_defaults(open_checkpoint(write_gguf(model, tmp_path / "m.gguf", **keys)))
    assert found.values == {"temperature": 0.7, "top_k": 40, "repetition_penalty": 1.1}


def test_without_a_recommendation_ours_are_used(model: Path):
    (model / "generation_config.json").unlink(missing_ok=True)
    assert sampling_defaults(open_checkpoint(model)).params() == SamplingParams()
    assert SamplingDefaults().params(seed=3, n=None) == SamplingParams(seed=3)


def test_a_built_in_model_whose_file_is_silent_has_its_makers_card(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    (model / "generation_config.json").unlink(missing_ok=True)
    monkeypatch.setattr("foreword.engine.loader.card_sampling", lambda path: {"temperature": 0.2})
    assert sampling_defaults(open_checkpoint(model)).values == {"temperature": 0.2}
    write(model, temperature=0.9)
    assert sampling_defaults(open_checkpoint(model)).values == {"temperature": 0.9}


@pytest.mark.parametrize("value", ["hot", True, -1, float("nan"), pytest.param(10**400, id="huge")])
def test_a_recommendation_that_makes_no_sense_is_refused_by_name(model: Path, value: object):
    write(model, temperature=value)
    with pytest.raises(CheckpointError, match="temperature"):
        sampling_defaults(open_checkpoint(model))
    assert sampling_defaults(open_checkpoint(model), "none") == SamplingDefaults()


def test_there_are_two_ways():
    with pytest.raises(RequestError, match="auto or none"):
        sampling_defaults(None, "vllm")  # type: ignore[arg-type]
