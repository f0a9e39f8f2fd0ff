# SPDX-License-Identifier: BSD-3-Clause
"""Every page is found from the first one, code blocks fit the page, and arguments have sections."""

import inspect
import re
from pathlib import Path

import pytest

import preamp

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WIDEST = 88  # columns of a code block on the built pages
NOT_FOR_USERS = (DOCS / "design.md",)  # its chart of rooms is as wide as the source

LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)#\s\"]+)(?:#[^)]*)?[)\"]")
BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def linked(page: Path) -> set[Path]:
    """Files under docs that a page links."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def too_wide(text: str) -> list[str]:
    blocks = (match[1] for match in BLOCK.finditer(text))
    return [line for block in blocks for line in block.splitlines() if len(line) > WIDEST]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_first_page_links_every_page() -> None:
    missing = set(PAGES) - {DOCS / "index.md"} - linked(DOCS / "index.md")
    assert sorted(map(name_of, missing)) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert [name_of(target) for target in linked(page) if not target.exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {str(page.relative_to(DOCS)) for page in PAGES} == named


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES)
        if page not in NOT_FOR_USERS
    ],
    ids=name_of,
)
def test_code_fits_the_page(page: Path) -> None:
    assert too_wide(page.read_text(encoding="utf-8")) == []


def test_a_wide_line_is_found_in_blocks_only() -> None:
    wide = "x" * (WIDEST + 1)
    text = (
        f"{wide}\n```python\nfits\n{wide}\n```\n{wide}\n\n- a\n\n  ```sh\n  {wide}\n  ```\n{wide}\n"
    )
    assert too_wide(text) == [wide, f"  {wide}"]


def test_the_readme_shows_the_whole_way() -> None:
    """What somebody who decides needs, in the order in which it is asked."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    order = ["What it gives", "Which level", "When not to use it", "Install", "A plain loop"]
    assert headings[: len(order)] == order
    assert {"From torch.amp", "From Apex", "In a framework"} <= set(headings)
    first_table = text.partition("\n|")[2].partition("\n\n")[0]
    assert "O5" in first_table
    assert "fp16" not in first_table


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 155


def test_every_argument_has_a_section() -> None:
    page = (DOCS / "arguments.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `(\w+)`$", page, re.MULTILINE)
    assert sorted(sections) == sorted(inspect.signature(preamp.initialize).parameters)
