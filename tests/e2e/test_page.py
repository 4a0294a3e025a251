"""The live page in a real browser, against a real server with an engine whose answers are known."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from foreword.control.reporting.figures import Bounds, ControlReport, PairReport
from foreword.server.api import generate
from helpers import fake_engine
from helpers.fake_engine import FIRST_VISIBLE, FakeEngine, expected_tokens, token_text
from helpers.learning_reports import TRAINED
from helpers.local_server import local_server
from helpers.playground import GUESSED, PLAIN, SETTINGS, finish, load, ready, run, spelled, texts

HOSTILE = '<img/src=x/onerror="window.hit=1"><script>window.hit=1</script>&lt;b>'


@pytest.fixture
def server(page_server):
    return page_server


def test_tokens_show_where_they_came_from(page, server):
    ready(page, server)
    page.fill("#depth", 3)
    page.fill("#temperature", 0.5)
    run(page)
    request = server.engine.requests[-1]
    assert request.speculation == {"method": "ngram", "num_speculative_tokens": 3}
    assert (request.params.temperature, request.params.seed, request.params.max_tokens) == (0.5, 7, 24)
    assert page.text(GUESSED) == spelled(server)
    # The engine accepts 0, 1, 2, 0, 1, 2 ... of two guesses, depending on how far the text is.
    shown = [token.get_attribute("class") for token in page.all(f"{GUESSED} .token")]
    accepted = sum("accepted" in name for name in shown)
    assert len(shown) == 24
    assert page.text("#count") == "24"
    passes = len(page.all(f"{GUESSED} .pass"))
    assert passes == 24 - accepted
    assert page.text("#tau") == f"{24 / passes:.2f}"
    assert page.text("#acceptance") == f"{round(100 * accepted / (2 * passes))} %"
    assert len(page.all("#positions li")) == 2
    assert float(page.text("#rate")) > 0
    assert "ms" in page.text("#verify-time")
    assert page.complaints() == []


def test_before_anything_runs_the_page_says_what_it_does_and_shows_a_recorded_race(page, server):
    load(page, server)
    assert page.text("#what").startswith("Speculative decoding: ")
    page.wait(lambda: page.find("#recorded").is_displayed())
    record = json.loads((files("foreword.server.page") / "static" / "recorded.json").read_text("utf-8"))
    about = page.text("#recorded .about")
    for part in ("Recorded on", record["date"], record["model"], record["machine"], "times as fast"):
        assert part in about
    bars = len(page.all("#recorded svg line"))
    assert bars == sum(len(one["passes"]) for one in record["runs"])
    assert texts(page, "#recorded .label") == [one["name"] for one in record["runs"]]
    page.find("#recorded button").click()
    page.wait(lambda: 0 < len(page.all("#recorded svg line")) < bars)
    page.wait(lambda: len(page.all("#recorded svg line")) == bars)
    ready(page, server)
    run(page)
    assert not page.find("#recorded").is_displayed(), "a run of one's own replaces it"
    assert page.complaints() == []


def test_the_recorded_race_is_of_one_text():
    """`scripts/record_race.py` writes it again."""
    record = json.loads((files("foreword.server.page") / "static" / "recorded.json").read_text("utf-8"))
    drafted, plain = record["runs"]
    assert drafted["text"] == plain["text"]
    assert sum(gained for *_, gained in drafted["passes"]) == sum(gained for *_, gained in plain["passes"])
    assert all(accepted <= gained for _, accepted, gained in drafted["passes"])
    assert not any(accepted for _, accepted, _ in plain["passes"])


def test_the_controllers_choice_is_shown(page, server):
    ready(page, server)
    run(page)
    assert not page.find("#controller").is_displayed()  # nobody was asked yet
    pair = PairReport("head", "code", in_use=True, kept=3, measured=Bounds(1.1, 1.25, 1.4))
    resting = PairReport("ngram", "code", predicted=Bounds(0.8, 0.9, 1.0))
    server.engine.control = ControlReport(pairs=(pair, resting))
    run(page)
    page.wait(lambda: page.find("#controller").is_displayed())
    told = texts(page, "#controller-pairs dd")
    assert told == ["on, depth 3; 1.25× measured", "not now; 0.90× expected"]
    assert page.complaints() == []


def test_the_head_that_the_server_trains_is_shown(page, server, monkeypatch):
    monkeypatch.setattr(server.engine, "learning", TRAINED)
    ready(page, server)
    run(page)
    page.wait(lambda: page.find("#controller").is_displayed())
    assert texts(page, "#controller-pairs dt")[-1] == "trained head"
    assert texts(page, "#controller-pairs dd")[-1] == "version 1 in use; rolling out"
    assert page.complaints() == []


def test_rejected_guesses_are_struck_out_on_hover(page, server):
    ready(page, server)
    run(page)
    assert not page.find("#tip").is_displayed()
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page.driver).move_to_element(page.find(f"{GUESSED} .missed")).perform()
    page.wait(lambda: page.find("#tip").is_displayed())
    struck = page.all("#tip s")
    assert [guess.text for guess in struck] == [token_text(FIRST_VISIBLE), token_text(FIRST_VISIBLE + 1)]
    assert "line-through" in struck[0].value_of_css_property("text-decoration")


def test_plain_and_speculative_side_by_side(page, server):
    ready(page, server)
    page.find("#compare").click()
    run(page)
    assert page.text(GUESSED) == page.text(PLAIN) == spelled(server)
    assert server.engine.requests[-1].speculation is False
    assert page.text("#verdict").startswith("Identical, all 24 tokens. Speculation ")
    assert page.all(f"{PLAIN} .accepted") == []


def test_a_difference_is_not_hidden(page, server, monkeypatch):
    def lie(request, index, count):
        told = expected_tokens(request, index, count)
        return told if request.speculation is not False else [*told[:9], FIRST_VISIBLE, *told[10:]]

    monkeypatch.setattr(fake_engine, "expected_tokens", lie)
    ready(page, server)
    page.find("#compare").click()
    run(page)
    assert page.text("#verdict") == "The texts differ, from token 10 on."
    assert "differs" in page.find("#verdict").get_attribute("class")


@pytest.mark.parametrize("depth", [5, 8])  # a strip, a tree
def test_whatever_the_model_says_is_text(page, server, monkeypatch, depth):
    monkeypatch.setattr(fake_engine, "token_text", lambda token: HOSTILE)
    monkeypatch.setattr(generate, "token_text", lambda tokenizer, token: HOSTILE)
    ready(page, server)
    page.fill("#max-tokens", 3)
    page.fill("#depth", depth)
    run(page)
    page.script("document.querySelector('.missed').focus()")
    assert page.text(GUESSED) == 3 * HOSTILE
    assert HOSTILE in page.text("#draft-picture")
    assert page.find(f"{GUESSED} .ghost").get_attribute("data-token") == HOSTILE
    assert page.script("return window.hit") is None
    assert page.all(f"{GUESSED} :not(span)") == []
    assert page.all("#draft-picture :not(ol, ul, li, span, s), #tip :not(s)") == []


def test_everything_works_from_the_keyboard(page, server):
    from selenium.webdriver.common.keys import Keys

    ready(page, server)
    fields = [
        "chip",
        "chip",
        "chip",
        "prompt",
        "method",
        "depth",
        "temperature",
        "seed",
        "max-tokens",
        "compare",
        "raw",
        "run",
    ]
    page.script("document.querySelector('.skip').focus()")
    for name in fields:
        page.press(Keys.TAB)
        assert page.focused() == name
    assert all(
        page.script("return arguments[0].labels.length", page.find(f"#{name}")) for name in fields[3:-1]
    )
    page.script("document.getElementById('prompt').focus()")
    page.press(Keys.CONTROL, Keys.ENTER)
    finish(page)
    page.script("document.getElementById('replay-play').focus()")
    for name in (
        "replay-back",
        "replay-forward",
        "replay-time",
        "replay-speed",
        "replay-end",
        "ghosts",
        "mono",
    ):
        page.press(Keys.TAB)
        assert page.focused() == name
    page.press(Keys.TAB)
    assert "missed" in page.focused()
    assert page.find("#tip").is_displayed()
    first = page.script("return document.activeElement")
    page.press(Keys.ARROW_RIGHT)
    assert page.script("return document.activeElement") != first
    page.press(Keys.ARROW_LEFT)
    assert page.script("return document.activeElement") == first
    page.press(Keys.TAB)  # the text is one stop, however many guesses were rejected
    assert "missed" not in page.focused()
    assert not page.find("#tip").is_displayed()
    assert page.find("#status").get_attribute("aria-live") == "polite"


def test_stop_ends_the_answer(page, tiny_model):
    with local_server(tiny_model, SETTINGS, FakeEngine(step_seconds=0.05)) as slow:
        ready(page, slow)
        page.fill("#max-tokens", 400)
        page.find("#run").click()
        page.wait(lambda: len(page.text(GUESSED)) > 3)
        page.find("#stop").click()
        page.wait(lambda: slow.engine.aborted)
        page.wait(lambda: page.text("#status").startswith("Stopped. "))
        assert page.text("#status").endswith("per second, seed 7.")
        assert "seed=7" in page.script("return location.hash")
        assert page.find("#replay").is_displayed()
        page.wait(lambda: page.find("#run").is_enabled())


def test_refusals_are_told(page, server):
    ready(page, server)
    page.fill("#max-tokens", 512)
    page.script("document.getElementById('ask').noValidate = true")
    page.find("#run").click()
    page.wait(lambda: page.text("#error"))
    assert "512" in page.text("#error")


def test_the_key_is_asked_for_and_sent(page, tiny_model):
    settings = replace(SETTINGS, api_keys=("secret",))
    with local_server(tiny_model, settings, FakeEngine()) as locked:
        page.open(locked.url)
        page.wait(lambda: page.find("#key").is_displayed())
        page.fill("#key", "wrong")
        page.find("#key-form button").click()
        page.wait(lambda: "does not know this key" in page.text("#error"))
        page.fill("#key", "secret")
        page.find("#key-form button").click()
        page.wait(lambda: page.find("#method").get_attribute("value"))
        assert not page.find("#key").is_displayed()
        page.fill("#max-tokens", 5)
        run(page)
        assert page.text(GUESSED) == spelled(locked)
        page.driver.refresh()
        page.wait(lambda: page.find("#method").get_attribute("value"))
        assert page.script("return localStorage.length") == 0


def test_a_server_that_hides_speculation(page, tiny_model):
    with local_server(tiny_model, replace(SETTINGS, show_speculation=False), FakeEngine()) as silent:
        ready(page, silent)
        page.find("#compare").click()
        run(page)
        assert page.text(GUESSED) == spelled(silent)
        assert page.all(".panes .token") == []
        assert not page.find("#tau").is_displayed()
        assert page.find("#hidden-note").is_displayed()
        assert page.text("#verdict").startswith("Identical")


def test_evenly_paced_streams_arrive_whole(page, server, tiny_model):
    with local_server(tiny_model, replace(SETTINGS, stream_pacing="even"), FakeEngine()) as paced:
        ready(page, paced)
        run(page)
        assert page.text(GUESSED) == spelled(paced)
        assert page.all(f"{GUESSED} .accepted")
        shown = texts(page, f"{GUESSED} .pass")
        ready(page, server)
        run(page)
        assert shown == texts(page, f"{GUESSED} .pass")


CONTRAST = """
const light = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (part) => {
  const color = getComputedStyle(part).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" && part.parentElement ? ground(part.parentElement) : color;
};
const parts = document.querySelectorAll(
  ".token, .cell, label, .hint, dt, dd, h2, button:enabled, #about, #tip s, .tick, .result");
return [...parts].map((part) => {
  const [a, b] = [light(getComputedStyle(part).color), light(ground(part))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), part.outerHTML];
}).sort((x, y) => x[0] - y[0])[0];
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_a_phone_and_the_dark(page, server, width, dark):
    ready(page, server, width=width, dark=dark)
    page.find("#compare").click()
    run(page)
    page.script("document.querySelector('.missed').focus()")
    assert page.script("return document.documentElement.scrollWidth") <= width
    ground = page.script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(ground) < 200) is dark
    worst, where = page.script(CONTRAST)
    assert worst >= 4.5, where


def test_nothing_is_loaded_from_elsewhere(page, server):
    ready(page, server)
    run(page)
    loaded = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert len(loaded) >= 15
    assert all(name.startswith(f"{server.url}/") for name in loaded)
    page.script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=1\">')")
    page.wait(lambda: any("Content Security Policy" in line for line in page.complaints()))
    assert page.script("return window.hit") is None
