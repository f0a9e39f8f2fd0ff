# SPDX-License-Identifier: BSD-3-Clause
"""HTML and SVG elements whose text and attributes are always visible and escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from preamp.report.words import NAME_LIMIT, shown, visible


class Html(str):
    """Text that is HTML already; templates take it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)


def tag(name: str, *children: str, **attributes: str | float | None) -> Html:
    """Build an element; children that are not `Html` are escaped.

    A trailing underscore of an attribute is dropped, the others become hyphens; ``None`` leaves the
    attribute out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Join content; what is not `Html` is escaped."""
    return Html(
        "".join(part if isinstance(part, Html) else escape(visible(part)) for part in parts)
    )


def breakable(name: str) -> Html:
    """Write a qualified name such that a line may end after each of its points."""
    return Html(escape(visible(name)).replace(".", ".<wbr>"))


def coordinate(value: float) -> str:
    """Write a number as short as a picture allows: one digit behind the point."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def percent(part: float) -> str:
    """Write a place between 0 and 1 as a percentage of the picture's width."""
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"


def picture(
    name: str, title: str, description: str, *children: str, height: float, class_: str = "plot"
) -> Html:
    """Build a picture that says what it shows, as wide as the page and ``height`` CSS pixels high.

    Its ids begin with ``name``, so no other on the page may have it. ``description`` is what there
    is to see in it, for those who do not see it.
    """
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        *children,
        class_=class_,
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        width="100%",
        height=height,
    )


def stretched(*children: str, width: float, height: float, y: float = 0) -> Html:
    """Build a part of a picture that is as wide as the picture, whatever that is.

    Children are drawn in a box of the given size, whose upper end is at ``y``, then stretched
    sideways; lines keep their width if their style says ``vector-effect: non-scaling-stroke``. Text
    does not belong here.
    """
    return tag(
        "svg",
        *children,
        y=coordinate(y),
        width="100%",
        height=coordinate(height),
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        preserveAspectRatio="none",
    )


def sample(*children: str, width: float = 20, height: float = 10) -> Html:
    """Draw what stands before a name in a legend."""
    return tag("svg", *children, width=width, height=height, aria_hidden="true")


def legend_of(entries: Iterable[tuple[Html, str]]) -> Html:
    """List names beside samples of what they name; nothing if there are none."""
    items = [tag("li", drawn, name) for drawn, name in entries]
    return tag("ul", *items, class_="legend") if items else Html()


def _value(value: str | float) -> str:
    return escape(visible(value) if isinstance(value, str) else coordinate(value), quote=True)


def name(text: str, limit: int = NAME_LIMIT) -> Html:
    """Write a name from outside: in the font of code, isolated from the text around it."""
    return tag("code", tag("bdi", breakable(shown(text, limit))))
