"""A new drafter is one file and one line of the registry; everything else reads what it declares."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.cli.options.model import speculation_choice
from foreword.drafters import names
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import as_drafter, drafter_kinds
from foreword.errors import RequestError
from foreword.server.settings import ServerSettings
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DrafterNeeds, DraftSource
from foreword.wire.draft_node import check_methods

FILE = '''
from dataclasses import dataclass

from foreword.drafters.registry import DrafterKind, TokenSelection
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, Traits


@dataclass(frozen=True)
class EchoConfig:
    times: int = 2  # draft tokens


class EchoDrafter(Drafter):
    """Drafts the newest token again."""

    traits = Traits(is_free=True, needs_target="it is shy")

    def __init__(self, config):
        self._times = config.times

    def propose(self, asks):
        return [
            Draft.chain(
                [ask.request.tokens[-1]] * min(self._times, ask.max_nodes, ask.max_depth),
                len(ask.request.tokens),
                ask.request.epoch,
            )
            for ask in asks
        ]


KIND = DrafterKind(
    "echoes the newest token",
    EchoConfig,
    lambda settings, _: EchoDrafter(settings),
    can_hang=False,
    selection=TokenSelection.CHOSEN,
    traits=EchoDrafter.traits,
)
'''
ROOT = Path(__file__).parents[3]
LINE = ("echo", "toy_echo_drafter:KIND")


@pytest.fixture
def _added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "toy_echo_drafter.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(names.OWN_METHODS, *LINE)
    drafter_kinds.cache_clear()
    yield
    drafter_kinds.cache_clear()


@pytest.mark.usefixtures("_added")
def test_the_command_line_the_config_the_server_and_nodes_know_it():
    assert speculation_choice("echo", None) == '{"method": "echo"}'
    with pytest.raises(RequestError, match=r"there are .*echo"):
        speculation_choice("echoes", None)
    assert SpeculationConfig.parse({"method": "echo", "times": 3}).options == (("times", 3),)
    with pytest.raises(RequestError, match="times must be a whole number"):
        SpeculationConfig.parse({"method": "echo", "times": "three"})
    with pytest.raises(RequestError, match=r"unknown key 'time'; known are .*times"):
        SpeculationConfig.parse({"method": "echo", "time": 3})
    assert "echo" in ServerSettings("model").methods
    with pytest.raises(RequestError, match="echo cannot draft on a node: it is shy"):
        check_methods(["echo"])


@pytest.mark.usefixtures("_added")
def test_an_engine_drafts_with_it(tiny_model: Path):
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=None)
    prompts, params = (
        [{"prompt_token_ids": [20] * 24}],
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    )
    plain = llm.generate(prompts, params)[0].outputs[0].token_ids
    llm.speculate({"method": "echo", "times": 3, "num_speculative_tokens": 4, "fixed": True})
    output = llm.generate(prompts, params)[0]
    assert output.outputs[0].token_ids == plain
    assert output.timings.draft_n > 0
    assert not llm.engine.drafters.fault_counts()


def test_a_plug_in_without_the_base_class_is_adapted_once():
    class Old:
        needs, stops, acceptance_by_level = DrafterNeeds(draws=True), True, (0.5,)

        def __init__(self) -> None:
            self.observed: list[object] = []

        def propose(self, asks: list[object]) -> list[Draft]:
            return [Draft()] * len(asks)

        def observe(self, commits: list[object]) -> None:
            self.observed += commits

    old = Old()
    drafter = as_drafter(old)
    assert drafter.traits.kind is DraftSource.LOOKUP
    assert drafter.traits.needs.draws
    assert drafter.traits.stops_itself
    assert not drafter.traits.starts_early
    assert drafter.traits.acceptance_by_level == (0.5,)
    assert drafter.propose([1, 2]) == [Draft(), Draft()]  # type: ignore[list-item]
    drafter.observe([3])  # type: ignore[list-item]
    assert old.observed == [3]
    assert drafter.memory_bytes() is None
    drafter.close()
    assert as_drafter(drafter) is drafter


def test_the_tables_in_the_docs_have_every_drafter_and_every_setting():
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    table = text.partition("| method | where draft tokens come from |")[2].partition("\n\n")[0]
    assert {row.split("|")[1].strip(" `") for row in table.splitlines()[2:]} == set(names.OWN_METHODS)
    printed = runpy.run_path(str(ROOT / "scripts" / "drafter_settings.py"))["table"]()
    assert f"\n{printed}\n\n" in text, "put what scripts/drafter_settings.py prints into docs/drafters.md"


@pytest.mark.parametrize(
    ("method", "values", "fault"),
    [
        ("suffix", {"min_probability": 0.0}, r"min_probability must be in \(0, 1\], not 0.0"),
        ("remote", {"drafters": "unix:/tmp/x", "shadow": -1}, "shadow must be 0 or more, not -1"),
        ("eagle3", {"tree_width": 65}, r"tree_width must be in 1 \.\. 64, not 65"),
        ("draft_model", {"model": "x", "tree_width": 0}, "tree_width"),
        ("rest", {}, "needs 'datastore' \\(a file written by"),
    ],
)
def test_a_setting_beyond_its_limit_is_refused_before_anything_is_loaded(
    method: str, values: dict[str, object], fault: str
):
    with pytest.raises(RequestError, match=fault):
        SpeculationConfig.parse({"method": method, **values})
