"""Whatever a third party's drafter does, every answer is the one that plain decoding gives."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword import LLM, SamplingParams
from foreword.drafters.registry import drafter_kinds
from helpers.faulty_drafters import FAULTS, HANG_SECONDS, SILENT

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([20, 21, 22] * 8, [50] * 20, list(range(30, 60)))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=30, seed=11, ignore_eos=True),
    SamplingParams(temperature=0.3, max_tokens=30, seed=12, ignore_eos=True),
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The faulty drafter, offered by another package as an entry point."""
    package = tmp_path / "faulty-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[foreword.drafters]\nfaulty = helpers.faulty_drafters:KIND\n")
    monkeypatch.syspath_prepend(tmp_path)
    drafter_kinds.cache_clear()  # it is looked for again, and after the test forgotten
    yield
    drafter_kinds.cache_clear()


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    llm.speculate(None)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_answers_are_those_of_plain_decoding(
    llm: LLM, plain: list[list[int]], fault: str, caplog: pytest.LogCaptureFixture
):
    timeout = HANG_SECONDS / 10 if fault == "hangs" else 30.0
    llm.speculate(
        {
            "method": "faulty",
            "fault": fault,
            "num_speculative_tokens": 4,
            "fixed": True,
            "draft_timeout": timeout,
        }
    )
    with caplog.at_level(logging.WARNING):
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert all(output.outputs[0].error is None for output in outputs)
    if fault != "hangs":  # while it hangs it is not asked, which may be all the time
        assert sum(output.timings.draft_n_accepted for output in outputs) > 0
    logged = [entry for entry in caplog.records if "faulty" in entry.getMessage()]
    assert len(logged) == (0 if fault in QUIET else 1)


QUIET = {SILENT, "a draft for another text"}
"""What is dropped, or does no harm, without being a fault."""
