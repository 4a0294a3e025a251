"""Reasoning is read apart from an answer's text, wherever the answer is cut into deltas."""

import random

import pytest

from foreword.server.api.reasoning import FORMATS, Reasoning, ReasoningReader

QWEN = Reasoning(FORMATS["qwen3"], is_open=False)
R1 = Reasoning(FORMATS["deepseek_r1"], is_open=True)
HARMONY = Reasoning(FORMATS["openai_gptoss"], is_open=False)  # names of control tokens are not in texts
GRANITE = Reasoning(FORMATS["granite"], is_open=False)

CASES = [
    (QWEN, "<think>\nSo 1 < 2 \n\n☃é\n</think>\n\nYes.\n", "So 1 < 2 \n\n☃é", "Yes.\n"),
    (QWEN, "\n<think></think>", "", ""),
    (QWEN, "No tags.", "", "No tags."),
    (QWEN, "<thin air>", "", "<thin air>"),
    (QWEN, "<thi", "", "<thi"),
    (QWEN, "  ", "", "  "),
    (QWEN, "", "", ""),
    (QWEN, "a <think>b</think>", "", "a <think>b</think>"),
    (QWEN, "<think>cut </thi", "cut </thi", ""),
    (QWEN, "<think>a</think>b</think> c <think>", "a", "b</think> c <think>"),
    (R1, "So.\n</think>\n\nYes", "So.", "Yes"),
    (R1, "<think>\nSo.</think>Yes", "So.", "Yes"),
    (R1, "never ends  ", "never ends", ""),
    (R1, "</think>{}", "", "{}"),
    (R1, "a << </ </think", "a << </ </think", ""),
    (HARMONY, "analysisThe final one?assistantfinal 42.", "The final one?", "42."),
    (HARMONY, "final42.", "", "42."),
    (HARMONY, "fin", "", "fin"),
    (HARMONY, "analysiscut assistantfi", "cut assistantfi", ""),
    (GRANITE, "Here is my thought process: hm\nHere is my response: ok", "hm", "ok"),
]


def read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    reader = ReasoningReader(reasoning)
    found = [reader.feed(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in found), "".join(text for _, text in found)


@pytest.mark.parametrize(("reasoning", "text", "thought", "said"), CASES)
def test_reasoning_and_text(reasoning: Reasoning, text: str, thought: str, said: str):
    assert read(reasoning, [text]) == (thought, said)
    assert read(reasoning, [*text, ""]) == (thought, said)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(reasoning, pieces) == (thought, said)


def test_text_is_given_as_soon_as_it_cannot_be_a_tag():
    reader = ReasoningReader(QWEN)
    assert reader.feed("<think>one </", is_end=False) == ("one", "")
    assert reader.feed("b", is_end=False) == (" </b", "")
    assert reader.feed("</think>x", is_end=False) == ("", "x")
    assert reader.feed(" y ", is_end=False) == ("", " y ")
