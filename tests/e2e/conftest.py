"""A browser, and a server with an engine whose answers are known."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.browser import Page, browser
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server
from helpers.playground import SETTINGS


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_server(tiny_model: Path) -> Iterator[LocalServer]:
    with local_server(tiny_model, SETTINGS, FakeEngine()) as running:
        yield running
