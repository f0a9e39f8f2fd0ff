# SPDX-License-Identifier: BSD-3-Clause
"""The page in a real browser: quiet, complete, on a phone, in the dark."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import records as made
from preamp.report import write
from report.planted import HEALTHY, train

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
if BROWSER is None and os.environ.get("PREAMP_NEEDS_BROWSER"):
    raise RuntimeError("PREAMP_NEEDS_BROWSER is set, but there is no chromium on the path")
if BROWSER is None:
    pytest.skip("there is no chromium on the path", allow_module_level=True)
if os.environ.get("PREAMP_NEEDS_BROWSER"):
    from playwright import sync_api as playwright
else:
    playwright = pytest.importorskip("playwright.sync_api")

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

SIZES = """() => [...document.querySelectorAll('svg[role=img]')].map(svg => {
  const box = svg.getBoundingClientRect();
  const drawn = svg.querySelectorAll('path, use').length;
  return [svg.querySelector('title').textContent, box.width, box.height, drawn];
})"""

COLOURS = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield opened
        opened.close()


@pytest.mark.each
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("kind", ["one", "hostile"])
def test_a_page_is_quiet_complete_and_fits(
    kind: str, width: int, scheme: str, browser: Any, tmp_path: Path
) -> None:
    hostile = {name: made.named(name) for name in made.HOSTILE}
    records = train(next(case for case in HEALTHY if case.name == "healthy-search-from-2^24"))
    path = write(tmp_path / "run.html", records if kind == "one" else hostile)
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page, troubles, requests = context.new_page(), list[str](), list[str]()
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    assert page.title() == "Training report"
    assert page.locator("header h1").is_visible()
    figures = page.evaluate(SIZES)
    assert ("Loss scale by step" in {title for title, *_ in figures}) == (kind == "one")
    for title, across, down, drawn in figures:
        assert across > 300, title
        assert down > 50, title
        assert drawn > 5, title
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("summary").first.click()
    assert page.locator("details ul").first.is_visible()
    assert page.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
    ground, ink = (sum(map(int, re.findall(r"\d+", c))) for c in page.evaluate(COLOURS))
    assert (ground < ink) == (scheme == "dark")
    assert (troubles, requests) == ([], [path.as_uri()])
    context.close()
