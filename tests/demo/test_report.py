# SPDX-License-Identifier: BSD-3-Clause
"""What is written: numbers, ``results.json``, and a page that stands alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.demo import result, row
from cases.pages import Outline, check_accessible, check_stands_alone
from preamp.core.errors import PreampUnavailableError
from preamp.demo import report, table
from preamp.demo.records import COMPARED, DERIVED, SCHEMA_VERSION, DemoResult, LevelResult
from preamp.demo.report import render
from preamp.demo.table import columns_of, format_seconds, note_of, remarks_of
from preamp.numerics import read_history

RUN = result(
    row("O0", loss_scale=1.0),
    row("O5", held_out_bits=5.05, step_seconds=(0.9, 0.1, 0.1, 0.1)),
    row(
        "O3",
        status="diverged",
        reason="it broke",
        held_out_bits=None,
        losses=(8.0, 7.0, math.nan, math.inf),
    ),
)


def cells_of(run: DemoResult, level: str) -> dict[str, tuple[str, str]]:
    found = next(row for row in run.levels if row.level == level)
    cells = {column.title: column.cell(found, run.baseline) for column in columns_of(run)}
    return {title: (cell.value, cell.detail) for title, cell in cells.items()}


def test_statistics_leave_the_warm_up_out() -> None:
    timed = row(step_seconds=(0.9, 0.2, 0.4, 0.3), warmup_steps=1, tokens_per_step=60)
    assert (timed.best_seconds, timed.median_seconds) == (0.2, 0.3)
    assert timed.tokens_per_second == pytest.approx(200.0)
    assert row(step_seconds=(0.5,), warmup_steps=1).best_seconds == 0.5
    assert row(step_seconds=()).best_seconds is None


def test_table_compares_with_o0() -> None:
    cells = cells_of(RUN, "O5")
    assert cells["level"] == ("O5", "")
    assert cells["weights / compute"] == ("fp16 / fp16", "fp32 masters")
    assert cells["held-out"] == ("5.050", "+1.00 %")
    assert cells["best"] == ("100", "×0.50")
    assert cells["median"] == ("100", "×0.33")
    assert cells["speed"] == ("600", "")
    assert cells["memory"] == ("16.0", "2+4+2+8")
    assert cells["kept"] == ("1.0", "×1.00")
    assert cells["loss"] == ("65,536", "")
    assert cells["skipped"] == ("1", "of 4")
    assert cells_of(RUN, "O3")["level"] == ("O3", "diverged")
    assert cells_of(RUN, "O3")["held-out"] == ("–", "")


def test_table_without_o0_has_no_ratios() -> None:
    cells = cells_of(result(row("O5")), "O5")
    assert cells["held-out"] == ("5.000", "")
    assert cells["best"] == ("200", "")


def test_row_of_a_level_that_never_stepped_is_empty() -> None:
    empty = row("O1", losses=(), step_seconds=(), dtypes=None, memory=None, activation_bytes=None)
    cells = cells_of(result(row(), empty), "O1")
    for title in ("weights / compute", "best", "median", "speed", "memory", "kept"):
        assert cells[title] == ("–", "")


def test_peak_memory_is_a_column_where_it_was_counted() -> None:
    assert "peak" not in cells_of(RUN, "O0")
    counted = result(row("O0", peak_bytes=2**30), row("O5", peak_bytes=2**29))
    assert cells_of(counted, "O5")["peak"] == ("512.0", "×0.50")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.00123, "1.23"), (0.0123, "12.3"), (0.123, "123"), (1.234, "1234")]
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_notes_say_what_happened_and_why_o3_may_be_worse() -> None:
    note = note_of(RUN.levels[2], RUN)
    assert note.startswith("Diverged: it broke (4 steps done).")
    assert "no fp32 masters" in note


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("lacks", [True, False])
@pytest.mark.parametrize("device", ["cpu (AVX512, 2 threads)", "cuda:0 (NVIDIA H200)"])
def test_notes_say_where_half_saves_no_time(
    half: str, lacks: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said is what the casts go by, so a CPU with units for fp16 is not taken for slow."""
    dtypes = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    monkeypatch.setattr(table, "cpu_lacks_matmul", lambda dtype: lacks and dtypes[dtype] == half)
    run = replace(RUN, device=device)
    level: Any = RUN.levels[1]
    level = replace(level, dtypes=replace(level.dtypes, compute=half))
    note = note_of(level, run)
    assert (f"{half} saves no time here" in note) is (lacks and device.startswith("cpu"))


def test_a_run_says_what_its_storage_did_not_do() -> None:
    run = result(row("O0"), row("O3"))
    plain, split = (replace(run, config=replace(run.config, storage=s)) for s in ("full", "split"))
    wide = "keeps float32 moments beside half weights, 8 bytes"
    assert [wide in note_of(level, split) for level in split.levels] == [False, True]
    assert wide not in note_of(plain.levels[1], plain)
    compact = replace(run, config=replace(run.config, storage="compact"))
    assert wide not in note_of(compact.levels[1], compact)
    moved = 'place="host" moved nothing, all is on the CPU.'
    on_host = replace(plain, config=replace(plain.config, place="host"))
    assert moved in render(on_host).replace("&#34;", '"')
    assert moved not in remarks_of(plain)
    assert moved not in remarks_of(replace(on_host, device="cuda:0 (NVIDIA H200)"))
    clipped = "Nothing was clipped at any level"
    released = replace(plain, config=replace(plain.config, release_gradients=True))
    assert clipped in render(released)
    assert clipped not in render(plain)
    assert not any(clipped in remark for remark in remarks_of(on_host))
    kept = "needs all gradients of a step, so they were kept."
    levels = [row(level) for level in ("O1", "O2", "O5")]
    assert [kept in note_of(level, released) for level in levels] == [True, True, False]
    released_on_host = replace(on_host, config=replace(on_host.config, release_gradients=True))
    assert not any(kept in note_of(level, released_on_host) for level in levels)


def test_results_have_what_was_measured_and_its_ratios(tmp_path: Path) -> None:
    page, data = report.write(RUN, tmp_path / "new" / "folder")
    document = json.loads(data.read_text(encoding="utf-8"))
    assert document["schema_version"] == SCHEMA_VERSION
    fields = {field.name for field in dataclasses.fields(LevelResult)} - {"records"}
    assert document["levels"][0].keys() == fields | {*DERIVED, *COMPARED}
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [level["level"] for level in document["levels"]] == ["O0", "O5", "O3"]
    assert document["levels"][1]["best_ratio"] == pytest.approx(0.5)
    assert document["levels"][1]["held_out_ratio"] == pytest.approx(1.01)
    assert document["levels"][2]["losses"] == [8.0, 7.0, None, None]
    assert document["levels"][0]["memory"]["total"] == 16.0


def test_page_has_every_level_in_a_table_and_stands_alone() -> None:
    text = render(RUN)
    check_stands_alone(text)
    page = check_accessible(text)
    table = Outline(text[text.index("<table>") : text.index("</table>") + len("</table>")])
    scopes = [attributes.get("scope") for attributes in table.all("th")]
    columns = len(columns_of(RUN))
    assert scopes == ["col"] * columns + ["row"] * 3
    assert len(table.all("td")) == 3 * (columns - 1)
    assert {"O0", "O5", "O3"} <= {word.strip() for word in table.words}
    assert len([svg for svg in page.all("svg") if svg.get("role") == "img"]) >= 3
    for level in RUN.levels:
        assert any(note_of(level, RUN) == word for word in page.words)


def test_page_is_the_report_on_the_records_of_all_levels() -> None:
    text = render(RUN)
    titles = ("Side by side", "Memory", "Skipped steps", "Loss by time", "Settings of the demo")
    for title in titles:
        assert title in text
    assert "4 steps, none of them skipped. The loss went from 8 to 5." in text


def test_page_escapes_text_from_outside() -> None:
    evil = row("O1", status="refused", reason="<script>alert('x')</script>")
    text = render(result(evil))
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_page_of_a_run_stopped_at_once() -> None:
    text = render(result(interrupted=True))
    assert "Interrupted" in text
    assert "No step is recorded" in text


def test_records_of_each_level_are_what_preamp_report_reads(tmp_path: Path) -> None:
    report.write(RUN, tmp_path)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "O0.jsonl",
        "O3.jsonl",
        "O5.jsonl",
    ]
    assert read_history(tmp_path / "runs" / "O0.jsonl") == list(RUN.levels[0].records)


def test_missing_packages_are_named_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    match = re.escape("Cannot import jinja2. The report needs jinja2. ")
    with pytest.raises(PreampUnavailableError, match=match) as caught:
        report.require_packages()
    assert 'pip install "preamp[cli,report]"' in str(caught.value)
