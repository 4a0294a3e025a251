import pytest

from foreword.backends.cpu.decoder import CpuDecoder
from foreword.backends.torch.decoder import TorchDecoder
from foreword.engine.drafting.default_speculation import WITHOUT_A_HEAD, choose_speculation
from foreword.errors import RequestError


def test_auto_guesses_only_where_guesses_cannot_change_a_text():
    chosen = choose_speculation("auto", is_shape_invariant=True).config
    assert chosen is not None
    assert WITHOUT_A_HEAD.items() <= {**chosen.as_mapping(), "method": "suffix"}.items()
    assert chosen.method == ("suffix",)
    refused = choose_speculation("auto", is_shape_invariant=False)
    assert refused.config is None
    assert "size of a pass" in refused.reason
    assert CpuDecoder.is_shape_invariant
    assert not TorchDecoder.is_shape_invariant


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_auto_gives_way_to_a_rule_under_which_guesses_change_the_text(rule: str):
    refused = choose_speculation("auto", True, rule)
    assert refused.config is None
    assert rule in refused.reason


@pytest.mark.parametrize("setting", [None, False, "off"])
def test_off_is_off(setting: str | bool | None):
    assert choose_speculation(setting, is_shape_invariant=True).config is None


def test_true_is_auto():
    assert choose_speculation(True, is_shape_invariant=True) == choose_speculation(
        "auto", is_shape_invariant=True
    )


@pytest.mark.parametrize("setting", ["ngram", '{"method": "ngram"}', {"method": "ngram"}])
def test_what_is_asked_for_by_name_is_used_anywhere(setting: object):
    chosen = choose_speculation(setting, is_shape_invariant=False).config  # type: ignore[arg-type]
    assert chosen is not None
    assert chosen.method == ("ngram",)


@pytest.mark.parametrize("setting", ["on", "ngram,suffix", "", "{", {"method": "magic"}])
def test_nonsense_is_refused(setting: object):
    with pytest.raises(RequestError):
        choose_speculation(setting, is_shape_invariant=True)  # type: ignore[arg-type]
