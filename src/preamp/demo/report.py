# SPDX-License-Identifier: BSD-3-Clause
"""A run as one HTML page."""

from __future__ import annotations

import jinja2
from markupsafe import Markup

from preamp.demo import notes
from preamp.demo.curves import pictures_of
from preamp.demo.records import DemoResult
from preamp.demo.table import columns_of


def render(result: DemoResult) -> str:
    """Write a run as one HTML page that refers to nothing outside itself.

    Args:
        result: The run.

    Returns:
        The page.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("preamp.demo", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    columns = columns_of(result)
    rows = [
        {
            "cells": [column.cell(row, result.baseline) for column in columns],
            "note": notes.note_of(row, result),
        }
        for row in result.levels
    ]
    return environment.get_template("report.html.j2").render(
        result=result,
        columns=columns,
        rows=rows,
        pictures=[(p, Markup(p.svg)) for p in pictures_of(result)],
        remarks=(notes.HELD_OUT, notes.TIMING, notes.MEMORY),
    )
