"""The page as a picture: passes, ghosts, trees, replay, race, prediction, and the address that keeps the settings."""

import json
from urllib.parse import parse_qs

import pytest

from foreword.bench.theory import break_even, expected_tokens
from foreword.engine.text import TokenTexts
from foreword.server.api import generate
from helpers import fake_engine
from helpers.fake_engine import FIRST_VISIBLE, token_text
from helpers.playground import GUESSED, PLAIN, choose, finish, load, ready, run, spelled, texts


@pytest.fixture
def server(page_server):
    return page_server


def address(page) -> dict[str, str]:
    told = parse_qs(page.script("return location.hash").removeprefix("#"))
    return {name: values[0] for name, values in told.items()}


def from_module(page, name: str, expression: str, *arguments: object) -> object:
    """What an expression over one of the page's modules, `m`, and the arguments, `a`, gives."""
    source = f"const [a, done] = [arguments[0], arguments[1]]; import('/page/{name}').then((m) => done({expression}));"
    return page.driver.execute_async_script(source, list(arguments))


def test_a_pass_is_a_bracket_a_column_and_a_strip(page, server):
    ready(page, server)
    run(page)
    # The engine accepts 0, 1, 2, 0 ... of two guesses: 1, 2 and 3 tokens per pass, as far as the text is long.
    assert "".join(texts(page, f"{GUESSED} .pass")) == spelled(server)
    columns = page.script("return document.querySelectorAll('#overview path.own').length")
    assert columns == len(page.all(f"{GUESSED} .pass"))
    half_right = next(i for i, part in enumerate(page.all(f"{GUESSED} .pass")) if len(part.text) == 2)
    page.script("document.querySelectorAll('.text .pass')[arguments[0]].focus()", half_right)
    assert page.text("#draft-title") == f"Pass {half_right + 1}"
    assert page.text("#draft-about").startswith("2 draft tokens, 1 accepted, 2 tokens gained")
    bracket = page.all(f"{GUESSED} .pass")[half_right].text
    assert texts(page, "#draft-picture .accepted") == [bracket[0]]
    assert texts(page, "#draft-picture s.rejected") == [token_text(FIRST_VISIBLE)]
    assert texts(page, "#draft-picture .own") == [bracket[1]]
    assert "selected" in page.all(f"{GUESSED} .pass")[half_right].get_attribute("class")


def test_rejected_guesses_are_ghosts_that_can_be_turned_off(page, server):
    ready(page, server)
    run(page)
    ghost = page.find(f"{GUESSED} .ghost")
    assert ghost.is_displayed()
    drawn = "return getComputedStyle(arguments[0], '::before')"
    assert page.script(f"{drawn}.textDecorationLine", ghost) == "line-through"
    assert page.script(f"{drawn}.content", ghost) == json.dumps(token_text(FIRST_VISIBLE))
    assert page.text(GUESSED) == spelled(server)  # they are not part of what is copied
    page.find("#ghosts").click()
    assert not ghost.is_displayed()
    assert "ghosts" not in address(page)
    page.find("#ghosts").click()


def test_drafts_that_branch_are_trees(page, server):
    ready(page, server)
    page.fill("#depth", 8)
    run(page)
    first = page.all(f"{GUESSED} .pass")[0]
    page.script("arguments[0].focus()", first)
    # Nodes 0 and 2 follow the text, 1 and 4 follow 0, 3 follows 2; the target's own token follows the text.
    shape = page.script("""
      const read = (list) => [...(list?.children ?? [])].map((item) => [
        item.children[0].className, read(item.children[1]),
      ]);
      return read(document.querySelector("#draft-picture .tree"));
    """)
    wrong = "cell rejected"
    assert shape == [[wrong, [[wrong, []], [wrong, []]]], [wrong, [[wrong, []]]], ["cell own", []]]
    assert [g.get_attribute("data-token") for g in first.find_elements("css selector", ".ghost")][-1] == "+3"


def test_newlines_are_seen_and_code_is_monospaced(page, server, monkeypatch):
    code = ["Look", ":\n", "```", "py\n", "x", " = 1\n\n", "```", "\n", "Done"]
    monkeypatch.setattr(fake_engine, "token_text", lambda token: code[token])
    monkeypatch.setattr(fake_engine, "expected_tokens", lambda *_: list(range(len(code))))
    monkeypatch.setattr(TokenTexts, "pieces", lambda _, delta: [code[token] for token in delta.token_ids])
    monkeypatch.setattr(generate, "token_text", lambda *_: "\n ")
    ready(page, server)
    run(page)
    assert page.text(GUESSED) == "Look:\n```py\nx = 1\n\n```\nDone"
    assert texts(page, f"{GUESSED} .newline") == ["\n"] * 5
    sign = "return getComputedStyle(document.querySelector('.text .newline'), '::before').content"
    assert page.script(sign) == '"⏎"'
    family = "return getComputedStyle(arguments[0]).fontFamily"
    fonts = {p.text.strip(): "mono" in page.script(family, p) for p in page.all(f"{GUESSED} .token")}
    assert fonts["x"]
    assert not fonts["Look"]
    assert not fonts["Done"]
    page.find("#mono").click()
    assert "mono" in page.script(family, page.find(GUESSED))
    page.script("document.querySelector('.text .missed').focus()")
    assert "⏎␣" in texts(page, "#draft-picture .rejected")
    page.find("#mono").click()


def test_a_run_is_replayed_pass_by_pass(page, server):
    ready(page, server)
    run(page)
    count = len(page.all(f"{GUESSED} .pass"))
    page.find("#replay-back").click()
    # The last pass is under way: its guesses are there, unjudged, and nothing that it gained.
    assert page.text("#replay-place").startswith(f"pass {count - 1} of {count} ")
    last = page.all(f"{GUESSED} .pass")[-1]
    assert "pending" in last.get_attribute("class")
    assert (
        page.script("return getComputedStyle(arguments[0].querySelector('.own')).visibility", last)
        == "hidden"
    )
    assert page.text("#draft-about") == "2 draft tokens, not verified yet"
    assert texts(page, "#draft-picture .own, #draft-picture .rejected, #draft-picture .accepted") == []
    page.find("#replay-back").click()
    assert "future" in last.get_attribute("class")
    page.find("#replay-forward").click()
    page.find("#replay-forward").click()
    assert page.all(f"{GUESSED} .pending, {GUESSED} .future") == []
    choose(page, "replay-speed", "1")
    page.find("#replay-play").click()
    page.wait(lambda: page.text("#replay-play") == "▶ Replay")  # it ends by itself
    assert page.all(f"{GUESSED} .pending, {GUESSED} .future") == []
    assert page.complaints() == []


def test_both_runs_race_on_one_time_axis(page, server):
    ready(page, server)
    page.find("#compare").click()
    run(page)
    boxes = page.script(
        "return [...document.querySelectorAll('#race .lane svg')].map((l) => l.getAttribute('viewBox'))"
    )
    assert boxes[0] == boxes[1]
    bars = [
        page.script(f"return document.querySelectorAll('#race .lane:nth-child({n}) .own').length")
        for n in (1, 2)
    ]
    assert bars == [len(page.all(f"{GUESSED} .pass")), 24]
    assert all(text.startswith("24 tokens · ") for text in texts(page, "#race .lane .result"))
    assert texts(page, "#race .lane .label") == ["ngram", "plain"]
    assert page.all("#race .tick")
    choose(page, "replay-time", "0")
    page.script("document.getElementById('replay-time').dispatchEvent(new Event('input'))")
    assert page.find("#race-cursor").is_displayed()
    assert len(page.all(f"{PLAIN} .future, {PLAIN} .pending")) == 23
    page.find("#replay-end").click()
    assert not page.find("#race-cursor").is_displayed()


def test_predicted_beside_measured(page, server):
    ready(page, server)
    run(page)
    assert (
        page.text("#predicted") == "–"
    )  # every pass had as many guesses: nothing tells what fewer would cost
    assert page.find("#outlook-note").is_displayed()
    page.find("#compare").click()
    run(page)
    assert page.text("#measured").endswith("×")
    assert page.text("#predicted").endswith("×")
    assert page.text("#best-depth").endswith("×")
    assert page.all("#outlook-chart .curve, #outlook-chart .best, #outlook-chart .measured")


def test_the_page_predicts_what_the_command_line_does(page, server):
    load(page, server)
    for alpha in (0.0, 0.3, 0.8, 1.0):
        for k in (1, 5, 64):
            found = from_module(page, "theory.js", "m.expectedTokens(...a)", alpha, k)
            assert found == pytest.approx(expected_tokens(alpha, k))
    for k, cost in ((1, 0.9), (1, 1.2), (5, 2.5), (5, 6.0), (5, 6.1)):
        found = from_module(page, "theory.js", "m.breakEven(...a)", k, cost)
        expected = break_even(k, cost)
        assert found is None if expected is None else found == pytest.approx(expected, abs=1e-9)


def chain(guesses: int, accepted: int, begin: float, took: float) -> dict[str, object]:
    return {
        "draftTokens": ["x"] * guesses,
        "accepted": list(range(accepted)),
        "levels": guesses,
        "begin": begin,
        "end": begin + took + 0.5 * guesses,
        "draftMs": 0.5 * guesses,
    }


def test_the_prediction_is_made_of_what_was_measured(page, server):
    """Passes of 10 ms for one row and 1 ms more for each other; half a millisecond for a guess."""
    load(page, server)
    told = [chain(0, 0, 0, 0)]
    for guesses, accepted in [(4, 4), (4, 2), (0, 0), (4, 0), (0, 0), (4, 4)] * 5:
        told.append(chain(guesses, accepted, 0, 10 + guesses))
    found = from_module(page, "theory.js", "m.outlook(a[0], [])", told)
    alpha, share, cost = 10 / 12, 4 / 6, 4 * 0.05 + 1.4
    assert found["alpha"] == pytest.approx(alpha)
    speedup = (share * expected_tokens(alpha, 4) + 1 - share) / (share * cost + 1 - share)
    assert found["depths"][3]["speedup"] == pytest.approx(speedup)
    assert found["predicted"] == pytest.approx(speedup)
    assert found["breakEven"] == pytest.approx(break_even(4, cost))
    assert found["best"] == max(found["depths"], key=lambda entry: entry["speedup"])
    assert from_module(page, "theory.js", "m.outlook(a[0], [])", told[:3]) is None


def test_the_address_keeps_seed_and_settings(page, server):
    ready(page, server)
    page.fill("#seed", "")
    page.fill("#temperature", 0.37)
    page.fill("#depth", 64)
    page.find("#compare").click()
    run(page)
    used = server.engine.requests[-1].params
    assert used.temperature == 0.37
    assert page.text("#status") == f"Both runs have finished, seed {used.seed}."
    told = address(page)
    kept = {"seed": str(used.seed), "temperature": "0.37", "depth": "64", "method": "ngram", "compare": "1"}
    assert kept.items() <= told.items()
    assert page.script("return location.search") == ""  # prompts do not reach the server's log
    page.find("#keep-seed").click()
    assert page.find("#seed").get_attribute("value") == str(used.seed)
    page.driver.refresh()
    page.wait(lambda: page.find("#method").get_attribute("value") == "ngram")
    page.wait(lambda: page.find("#temperature").get_attribute("value") == "0.37")
    assert page.find("#compare").is_selected()
    run(page)
    assert server.engine.requests[-1].params == used


def test_a_strange_address_does_no_harm(page, server):
    load(page, server, "#method=nobody&depth=%3Cb%3E&temperature=hot&prompt=%3Cimg%20src%3Dx%3E&ghosts=1")
    assert page.find("#method").get_attribute("value") == "default"
    assert page.find("#depth").get_attribute("value") == "5"
    assert page.find("#prompt").get_attribute("value") == "<img src=x>"
    page.script("document.querySelector('.skip').click()")
    assert page.focused() == "prompt"
    assert address(page)["prompt"] == "<img src=x>"
    page.fill("#max-tokens", 5)
    run(page)
    assert server.engine.requests[-1].speculation == {
        "num_speculative_tokens": 5
    }  # of whatever the server has


def test_prompts_to_try(page, server):
    ready(page, server)
    seen = set()
    for chip in page.all(".chips .chip"):
        chip.click()
        seen.add(page.find("#prompt").get_attribute("value"))
        assert page.script("return document.getElementById('ask').checkValidity()")
        assert address(page)["prompt"] == page.find("#prompt").get_attribute("value")
    assert len(seen) == 3
    assert texts(page, ".chips .chip") == ["speeds up", "breaks even", "slows down"]


def test_on_a_phone_figures_come_first_and_nothing_hovers(page, server):
    ready(page, server, width=390)
    page.find("#run").click()
    finish(page)
    top = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
    assert page.script(top, ".tiles") < page.script(top, GUESSED)
    assert page.script("return scrollY") > 0  # past the form
    assert not any(part.is_displayed() for part in page.all(".hover, .keys"))
