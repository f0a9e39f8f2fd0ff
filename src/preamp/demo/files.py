# SPDX-License-Identifier: BSD-3-Clause
"""A run as files: ``report.html`` for people, ``results.json`` and records for programs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import tempfile
from pathlib import Path

from preamp.core.errors import PreampUnavailableError, message, system_error
from preamp.demo.records import DemoResult, to_json
from preamp.numerics import to_json as record_to_json

NEEDS = ("jinja2",)


def require_packages() -> None:
    """Refuse before the training, not after it, where the report cannot be written."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise PreampUnavailableError(
            message(
                f"Cannot import {' and '.join(missing)}",
                f"The report needs {' and '.join(NEEDS)}",
                'Install them with: pip install "preamp[cli,report]"',
            )
        )


def require_folder(folder: Path) -> None:
    """Refuse before the training a folder that cannot be made or written to, by an `OSError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise system_error(
            error,
            f"{folder} cannot be written to",
            "The report and its data go to a folder, which is made where it does not exist",
            "Pass another one by --out",
        ) from None


def write(result: DemoResult, folder: Path) -> tuple[Path, Path]:
    """Write and return the report and the data; write records of each level under ``runs``."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "results.json"
    text = json.dumps(to_json(result), indent=1, allow_nan=False)
    data.write_text(text + "\n", encoding="utf-8")
    _write_records(result, folder / "runs")
    page = folder / "report.html"
    # By name and late: the data are safe before the packages for the page are imported.
    render = importlib.import_module("preamp.demo.report").render
    page.write_text(render(result), encoding="utf-8")
    return page, data


def _write_records(result: DemoResult, folder: Path) -> None:
    """Write what ``preamp report`` reads, one file for each level that has any."""
    for row in result.levels:
        if row.records:
            folder.mkdir(exist_ok=True)
            lines = (json.dumps(record_to_json(r), allow_nan=False) + "\n" for r in row.records)
            (folder / f"{row.level}.jsonl").write_text("".join(lines), encoding="utf-8")
