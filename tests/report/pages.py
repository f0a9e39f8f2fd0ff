# SPDX-License-Identifier: BSD-3-Clause
"""Pages of HTML: their elements, and what holds for every one of them."""

import re
from html.parser import HTMLParser
from itertools import pairwise

VOID = frozenset({"meta", "wbr"})


class Outline(HTMLParser):
    """Collects elements and text, and checks that elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def check_accessible(text: str) -> Outline:
    page = Outline(text)
    assert page.all("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set((attributes.get(name) or "").split()) <= set(ids), (tag, attributes)
    for landmark in ("header", "main", "footer"):
        assert len(page.all(landmark)) == 1
    for picture in page.all("svg"):
        assert picture.get("role") == "img"
        assert picture.get("aria-labelledby")
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    regions = [a for _, a in page.elements if "scroll" in (a.get("class") or "").split()]
    assert len(regions) == len(page.all("table"))
    for region in regions:
        assert (region["role"], region["tabindex"]) == ("region", "0")
        assert region["aria-labelledby"]
    targets = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)
    assert {first or second for first, second in targets} <= set(ids)
    return page


def check_stands_alone(text: str) -> None:
    """Nothing of the page is fetched from elsewhere, and nothing in it runs."""
    page = Outline(text)
    assert not {"script", "link", "img", "iframe", "object", "image"} & {
        t for t, _ in page.elements
    }
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"], tag
        assert (attributes.get("href") or "#").startswith("#")
    policy = [meta.get("content") for meta in page.all("meta")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policy
    assert not re.search(r"https?:|//\w|@import|javascript:", text)
