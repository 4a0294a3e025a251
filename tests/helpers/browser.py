"""A real, headless Chromium, driven by selenium."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """A browser's window, as the tests look at it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, dark: bool = False) -> None:
        """Load an address in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.get("about:blank")
        self.driver.get_log("browser")  # what an earlier test left
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)

    def script(self, source: str, *arguments: object) -> Any:
        return self.driver.execute_script(source, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0]).textContent", selector))

    def fill(self, selector: str, value: object) -> None:
        field = self.find(selector)
        field.clear()
        field.send_keys(str(value))

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self) -> str:
        return str(self.script("return document.activeElement.id || document.activeElement.className"))

    def wait(self, condition: Callable[[], object]) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 30, 0.05).until(lambda _: condition())

    def complaints(self) -> list[str]:
        """What the browser's console says: failed loads, broken scripts, violations of the policy."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]


@contextmanager
def browser() -> Iterator[Page]:
    """A window; skips the test where no Chromium with its driver is found (`make browser` installs them)."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    guide = shutil.which("chromedriver")
    if program is None or guide is None:
        pytest.skip("no Chromium here; `make browser` installs one")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if os.getuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(guide))
    try:
        yield Page(driver)
    finally:
        driver.quit()
