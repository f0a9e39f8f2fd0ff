# SPDX-License-Identifier: BSD-3-Clause
"""The page in a real browser: quiet, complete, on a phone, in the dark, by keyboard."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cases import records as made
from cases.sample_run import train
from preamp.report import write

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
  const drawn = svg.querySelectorAll('path, rect, text').length;
  return [svg.querySelector('title').textContent, box.width, box.height, drawn];
})"""

REGIONS = """() => [...document.querySelectorAll('[role=region]')]
  .filter(region => region.checkVisibility()).length"""

OUTSIDE = """() => [...document.querySelectorAll('main svg.plot text')].filter(text => {
  const box = text.getBoundingClientRect();
  return box.left < 0 || box.right > document.documentElement.clientWidth + 0.5;
}).map(text => text.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hostile = {name: made.named(name) for name in made.HOSTILE}
    o2 = train("O2", steps=30)
    return {
        "one": write(folder / "one.html", o2, title="A run at O2"),
        "many": write(folder / "many.html", {"O1": train("O1", steps=30), "O2": o2}),
        "hostile": write(folder / "hostile.html", hostile),
        "empty": write(folder / "empty.html", []),
    }


class Visit:
    """One open page, and everything that it should not have done."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        self.page = context.new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.address = path.as_uri()
        self.page.goto(self.address)


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    opened: list[Visit] = []

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Visit:
        opened.append(Visit(browser, pages[name], width, scheme))
        return opened[-1]

    yield open_page
    for seen in opened:
        seen.page.context.close()


@pytest.mark.each
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", ["one", "many", "hostile", "empty"])
def test_page_is_quiet_complete_and_fits(visit: Any, name: str, width: int) -> None:
    seen = visit(name, width)
    assert seen.troubles == []
    assert seen.requests == [seen.address]
    figures = seen.page.evaluate(SIZES)
    assert bool(figures) == (name != "empty")
    for title, across, down, drawn in figures:
        assert across > 40, title
        assert down > 8, title
        assert drawn > 0, title
    room = seen.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert room[0] <= room[1] == width
    assert seen.page.evaluate(OUTSIDE) == []


def test_every_kind_of_figure_is_there(visit: Any) -> None:
    titles = {title for title, *_ in visit("one").page.evaluate(SIZES)}
    for kind in ("Loss by step", "Loss scale by step"):
        assert kind in titles
    assert any(title.startswith("Underflow in ") for title in titles)
    titles = {title for title, *_ in visit("many").page.evaluate(SIZES)}
    assert {"Loss by step, all runs", "Loss scale by step"} <= titles


def test_hostile_names_do_nothing(visit: Any) -> None:
    seen = visit("hostile")
    assert seen.page.title() == "Training report"
    assert seen.page.evaluate("document.querySelectorAll('script, img, iframe').length") == 0
    seen.page.locator("summary").first.click()
    assert seen.page.title() == "Training report"
    assert seen.troubles == []


def test_tab_reaches_all_scroll_regions_and_can_skip_to_the_report(visit: Any) -> None:
    page = visit("one").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip-link"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    reached = 0
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached += page.evaluate("document.activeElement.getAttribute('role') === 'region'")
    assert reached == page.evaluate(REGIONS) > 2


def test_wide_tables_scroll_by_keyboard(visit: Any) -> None:
    page = visit("one", 375).page
    region = page.locator("#skips-list-caption").locator("xpath=ancestor::*[@role='region']")
    assert region.evaluate("region => region.scrollWidth > region.clientWidth")
    region.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("region => region.scrollLeft > 0", arg=region.element_handle())


def test_details_open_by_keyboard(visit: Any) -> None:
    page = visit("one").page
    summary = page.locator("details.more > summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.more").first.get_attribute("open") is not None


def test_the_dark_page_is_dark_and_its_text_is_light(visit: Any) -> None:
    colours = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    for scheme, is_dark in (("light", False), ("dark", True)):
        ground, ink = visit("one", scheme=scheme).page.evaluate(colours)
        assert (brightness(ground) < brightness(ink)) == is_dark


def test_print_is_light(visit: Any) -> None:
    page = visit("one", scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert brightness(ground) > 700


def brightness(colour: str) -> float:
    return sum(map(float, colour.removeprefix("rgb(").removesuffix(")").split(",")))
