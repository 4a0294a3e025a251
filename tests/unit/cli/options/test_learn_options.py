"""Options of `foreword serve --learn`: what excludes it, and what the engine gets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.cli.options.learn import LearnOptions
from foreword.drafters.config import SpeculationConfig
from foreword.engine.drafting.default_speculation import SpeculationChoice
from foreword.errors import RequestError
from foreword.learn.settings import LearnSettings
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.server.settings import tenant_of

A = tenant_of("a")
CHOICE = SpeculationChoice(SpeculationConfig.parse({"method": "ngram"}), "chosen")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": Path("p.json")}, "--learn writes the policy file itself; leave out --speculation-policy"),
        ({"speculation": "off"}, "--learn trains a drafter; leave out --speculation off"),
        ({"processes": 2}, "--learn does not support a --tensor-parallel-size above 1"),
        ({"has_keys": True}, "with API keys, --learn needs --learn-tenants"),
    ],
)
def test_what_excludes_learning(given: dict[str, Any], message: str):
    usual: dict[str, Any] = {"policy": None, "speculation": "auto", "processes": 1, "has_keys": False}
    LearnOptions(learn=True).check(**usual)
    LearnOptions().check(**usual | given)  # without --learn, nothing is refused
    with pytest.raises(RequestError, match=message):
        LearnOptions(learn=True).check(**usual | given)


def test_with_api_keys_the_tenants_are_named():
    LearnOptions(learn=True, learn_tenants="*").check(None, "auto", 1, has_keys=True)
    with pytest.raises(RequestError, match="--learn-tenants"):
        LearnOptions(learn=True, learn_tenants=" , ").check(None, "auto", 1, has_keys=True)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"learn_dir": Path("x")}, "--learn-dir"), ({"learn_keep_texts": True}, "--learn-keep-texts")],
)
def test_other_options_need_learning(options: dict[str, Any], name: str):
    with pytest.raises(RequestError, match=f"^{name} needs --learn$"):
        LearnOptions(**options)


def test_a_training_needs_no_more_texts_than_are_kept():
    LearnOptions(learn=True, learn_tokens=2000, learn_min_tokens=2000)
    with pytest.raises(RequestError, match="--learn-min-tokens 2001 is more than --learn-tokens 2000 keeps"):
        LearnOptions(learn=True, learn_tokens=2000, learn_min_tokens=2001)


@pytest.mark.parametrize(
    ("tenants", "has_keys", "message"),
    [
        ("Bob", True, "32 digits from `foreword policy tenant`, or [*], not 'Bob'"),
        (f"{A},*,none", True, "not 'none'"),
        (A, False, "a server without API keys has one tenant"),
    ],
)
def test_tenants_that_no_request_can_have_are_refused(tenants: str, has_keys: bool, message: str):
    LearnOptions(learn=True, learn_tenants=f"{A},*").check(None, "auto", 1, has_keys=True)
    LearnOptions(learn=True, learn_tenants="*").check(None, "auto", 1, has_keys=False)
    with pytest.raises(RequestError, match=message):
        LearnOptions(learn=True, learn_tenants=tenants).check(None, "auto", 1, has_keys)


def test_an_unknown_device_is_refused():
    with pytest.raises(RequestError, match="--learn-device must be auto, cpu or cuda"):
        LearnOptions(learn=True, learn_device="tpu")


def test_the_engine_gets_the_settings(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    checkpoint = open_checkpoint(tiny_model)
    options = LearnOptions(learn=True, learn_hours=2.0, learn_tenants="a, b", learn_keep_texts=True)
    settings = LearnSettings.of(options.settings(checkpoint, CHOICE))
    assert (settings.hours, settings.tenants, settings.keeps_texts) == (2.0, ("a", "b"), True)
    assert settings.home.parent == tmp_path / "cache/learn"
    plain = LearnSettings.of(LearnOptions(learn=True, learn_dir=tmp_path).settings(checkpoint, CHOICE))
    assert plain == LearnSettings(str(tmp_path))  # options and settings have the same defaults
    assert plain.takes_part("anybody") and not settings.takes_part("c")
    assert LearnOptions().settings(checkpoint, CHOICE) == {}


def test_a_model_without_speculation_cannot_learn(tiny_model: Path):
    checkpoint, options = open_checkpoint(tiny_model), LearnOptions(learn=True)
    with pytest.raises(RequestError, match="--learn needs speculative decoding: this backend"):
        options.settings(checkpoint, SpeculationChoice(None, "this backend"))
    fixed = replace(CHOICE, config=SpeculationConfig.parse({"method": "ngram", "fixed": True}))
    with pytest.raises(RequestError, match="leave out fixed"):
        options.settings(checkpoint, fixed)
