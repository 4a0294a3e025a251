"""Drafters under the rules that ask what was drawn, and which of them are refused."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import TokenSelection, drafter_kinds
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from helpers.drafted_answers import PROMPTS, answers, noisy_copy, store_of_answers


@pytest.fixture(scope="module")
def files(
    tiny_model: Path, tiny_heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What a method needs besides its own settings: files, or to draft for short texts."""
    folder = tmp_path_factory.mktemp("files")
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")
    return {
        "draft_model": {"model": str(noisy_copy(tiny_model, folder / "model"))},
        "rest": {"datastore": str(store_of_answers(llm, folder))},
        "sparse_kv": {"sink_tokens": 3, "window_tokens": 8, "top_tokens": 0},
        **{method: {"model": str(path)} for method, path in tiny_heads.items()},
    }


TWO_PROMPTS = [PROMPTS[1], PROMPTS[3]]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=10, seed=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm_under(tiny_model: Path) -> Callable[[str], LLM]:
    """One engine for each rule. Prompts are cut and drafts made without regard to time: what is drawn under these
    rules depends on which passes had guesses, and a prompt whose last row is by itself has some in the pass of its
    first token.
    """

    def build(rule: str) -> LLM:
        config = EngineConfig(acceptance_rule=rule, max_step_seconds=None, max_draft_share=1e9)
        return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", config=config)

    return cache(build)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[list[int]]:
    """The greedy texts, which no rule has a part in."""
    return answers(
        LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu"), TWO_PROMPTS, [GREEDY] * 2
    )


@pytest.fixture
def check_rule(
    llm_under: Callable[[str], LLM], files: dict[str, dict[str, Any]], plain: list[list[int]]
) -> Callable[[Sequence[dict[str, Any]], str], None]:
    """Greedy text is the plain one under each rule; sampled text repeats by seed with drafters that learn nothing.

    All forms are in the same batches.
    """

    def check(forms: Sequence[dict[str, Any]], rule: str) -> None:
        forms = [{**form, **needed(form), "fixed": True} for form in forms]  # asked, whether or not it pays
        llm = llm_under(rule)
        llm.offer([SpeculationConfig.parse(form) for form in forms])
        settings = [form for form in forms for _ in TWO_PROMPTS]

        def said(params: SamplingParams) -> list[list[int]]:
            outputs = llm.generate(TWO_PROMPTS * len(forms), params, speculation=settings)
            assert all(output.timings.draft_n for output in outputs[::2]), "somebody has not guessed"
            return [output.outputs[0].token_ids for output in outputs]

        texts = zip(settings, said(GREEDY), plain * len(forms), strict=True)
        wrong = [form for form, text, expected in texts if text != expected]
        assert not wrong, "other texts"
        assert said(SAMPLED) == said(SAMPLED)

    def needed(form: dict[str, Any]) -> dict[str, Any]:
        return files.get(form["method"], {}) if isinstance(form["method"], str) else {}

    return check


CHAINS = [
    {"method": method, "num_speculative_tokens": 4}
    for method in (
        *("ngram", "jacobi", "draft_model", "layer_skip", "self_quantized", "sparse_kv"),
        *("eagle", "eagle3", "p_eagle", "medusa", "mtp", "dflash", "dflash2", "dspark"),
    )
]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_chains_run_under_every_rule(check_rule: Callable[[Sequence[dict[str, Any]], str], None], rule: str):
    check_rule(CHAINS, rule)


TREES: list[dict[str, Any]] = [
    {"method": "suffix", "num_speculative_tokens": 9, "min_match": 1, "max_stored_tokens": 0},
    {"method": "rest", "num_speculative_tokens": 8, "min_match": 1},
    {"method": "lookahead", "num_speculative_tokens": 20},
    {"method": "jacobi", "num_speculative_tokens": 5},
    {"method": "draft_model", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "layer_skip", "num_speculative_tokens": 4, "exit_layer": 1},
    {"method": "self_quantized", "num_speculative_tokens": 8, "bits": 2, "tree_width": 2},
    {"method": "sparse_kv", "num_speculative_tokens": 7, "tree_width": 2},
    {"method": "eagle3", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "eagle", "num_speculative_tokens": 6, "tree_width": 2},
    {"method": "p_eagle", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "mtp", "num_speculative_tokens": 6, "tree_width": 2},
    {"method": "dflash", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "medusa", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "dspark", "num_speculative_tokens": 9, "tree_width": 3},
    {"method": "medusa", "num_speculative_tokens": 8, "medusa_choices": "file"},
    {
        "method": ["suffix", "layer_skip"],
        "num_speculative_tokens": 6,
        "tree_width": 2,
        "max_stored_tokens": 0,
    },
    {
        "method": ["suffix", "ngram"],
        "num_speculative_tokens": 8,
        "combine": "merge",
        "max_stored_tokens": 0,
    },
]


@pytest.mark.parametrize("forms", [TREES[:8], TREES[8:]], ids=["lookups and models", "heads and several"])
def test_trees_run_under_traversal(
    check_rule: Callable[[Sequence[dict[str, Any]], str], None], forms: Sequence[dict[str, Any]]
):
    check_rule(forms, "traversal")


@pytest.mark.parametrize(
    "form",
    [
        {"method": "suffix"},
        {"method": "lookahead"},
        {"method": "layer_skip", "tree_width": 2},
        {"method": "medusa", "model": "somewhere", "medusa_choices": [[0], [1]]},
        {"method": ["ngram", "layer_skip"], "combine": "merge"},
    ],
)
def test_trees_are_refused_by_rules_that_need_chains(tiny_model: Path, form: dict[str, Any]):
    config = EngineConfig(acceptance_rule="token")
    with pytest.raises(RequestError, match="chains only"):
        LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", config=config, speculation=form)


def test_trees_ranked_by_what_was_drawn_are_refused_for_traversal(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another package's that does not say otherwise; what it makes is not known before it is judged."""
    kind = replace(drafter_kinds()["suffix"], selection=TokenSelection.RANKED)
    kinds = {**drafter_kinds(), "ranking": kind}
    monkeypatch.setattr("foreword.drafters.config.drafter_kinds", lambda: kinds)
    config = EngineConfig(acceptance_rule="traversal")
    with pytest.raises(RequestError, match="fixed before a token is sampled"):
        LLM(
            str(tiny_model),
            dtype="float32",
            device="cpu",
            backend="cpu",
            config=config,
            speculation={"method": "ranking"},
        )
