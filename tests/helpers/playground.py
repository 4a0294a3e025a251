"""The live page as a reader uses it."""

from foreword.drafters.config import SpeculationConfig
from foreword.server.settings import ServerSettings
from helpers.browser import Page
from helpers.fake_engine import expected_tokens, token_text
from helpers.local_server import LocalServer

SETTINGS = ServerSettings("tiny", speculation=SpeculationConfig.parse({"method": "ngram"}))
GUESSED, PLAIN = "#speculative .text", "#plain .text"


def load(page: Page, server: LocalServer, fragment: str = "", **look: object) -> None:
    page.open(f"{server.url}/{fragment}", **look)
    page.wait(lambda: page.find("#method").get_attribute("value"))


def ready(page: Page, server: LocalServer, **look: object) -> None:
    load(page, server, **look)
    choose(page, "method", "ngram")
    page.fill("#max-tokens", 24)
    page.fill("#seed", 7)


def choose(page: Page, field: str, value: str) -> None:
    page.script("document.getElementById(arguments[0]).value = arguments[1]", field, value)


def run(page: Page) -> None:
    page.find("#run").click()
    finish(page)


def finish(page: Page) -> None:
    page.wait(lambda: page.text("#status") and page.find("#run").is_enabled())


def texts(page: Page, selector: str) -> list[str]:
    return [str(part.get_attribute("textContent")) for part in page.all(selector)]


def spelled(server: LocalServer) -> str:
    """What the engine has to say to the last request."""
    request = server.engine.requests[-1]
    return "".join(map(token_text, expected_tokens(request, 0, request.params.max_tokens)))
