# SPDX-License-Identifier: BSD-3-Clause
"""The template, and the package that fills it."""

from __future__ import annotations

from preamp.core.errors import PreampUnavailableError, message
from preamp.report.blocks import Page
from preamp.report.svg import Html
from preamp.report.words import visible


def fill(page: Page) -> str:
    """Write a page as HTML; raises `PreampUnavailableError` where jinja2 is missing."""
    # Late, because the library is imported without jinja2 and must not need it.
    try:
        import jinja2
    except ImportError:
        raise PreampUnavailableError(
            message(
                "Cannot import jinja2",
                "A report is written with it; the rest of the library does not need it",
                'Install it with: pip install "preamp[report]"',
            )
        ) from None
    loader = jinja2.PackageLoader("preamp.report", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = loader.get_source(environment, "style.css")[0]
    return environment.get_template("report.html.j2").render(page=page, style=Html(style))


def _visible(value: object) -> object:
    """Spell what is invisible in text from outside; HTML is left alone."""
    return visible(value) if type(value) is str else value
