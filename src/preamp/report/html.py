# SPDX-License-Identifier: BSD-3-Clause
"""Pieces of HTML whose text and attributes are always visible and escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from preamp.report.words import NAME_LIMIT, shown, visible


class Html(str):
    """Text that is HTML already; templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Build an element; children that are not `Html` are escaped.

    Underscores of attributes become hyphens.
    """
    written = "".join(
        f' {key.replace("_", "-")}="{escape(visible(value), quote=True)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Join content; what is not `Html` is escaped."""
    return Html(
        "".join(part if isinstance(part, Html) else escape(visible(part)) for part in parts)
    )


def name(text: str, limit: int = NAME_LIMIT) -> Html:
    """Write a name from outside: in the font of code, isolated, with breaks after its points."""
    breakable = Html(joined([shown(text, limit)]).replace(".", ".<wbr>"))
    return tag("code", tag("bdi", breakable))
