# SPDX-License-Identifier: BSD-3-Clause
"""The README's picture is what the recorded run of the demo gives, on light and on dark pages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import picture
import preamp
from cases.demo import result, row
from preamp.demo.records import to_json
from preamp_bench.records import read

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("look", picture.COLOURS)
def test_the_committed_picture_is_that_of_the_newest_row(look: str) -> None:
    (newest,) = read(picture.ROWS)[-1:]
    drawn = picture.draw(newest, look)
    assert (picture.DOCS / f"demo-{look}.svg").read_text(encoding="utf-8") == drawn
    root = ElementTree.fromstring(drawn)
    assert root[0].tag.endswith("title")
    for level in newest["levels"]:
        assert f">{level['held_out_bits']:.3f}</text>" in drawn
    assert {level["level"] for level in newest["levels"]} == set(preamp.OPT_LEVELS)
    assert newest["config"]["steps"] == 300
    assert {"date", "commit", "torch", "cpu"} <= newest.keys()


@pytest.mark.parametrize(("page", "folder"), [("README.md", "docs/"), ("docs/index.md", "")])
def test_pages_show_it_by_what_the_reader_prefers(page: str, folder: str) -> None:
    shown = re.findall(r"<picture>.*?</picture>", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert len(shown) == 1
    assert f'"(prefers-color-scheme: dark)" srcset="{folder}demo-dark.svg"' in shown[0]
    assert f'src="{folder}demo-light.svg"' in shown[0]


def test_a_new_run_becomes_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that diverged has a shorter line, and no bar of what was not measured."""
    monkeypatch.setattr(picture, "ROWS", tmp_path / "demo.jsonl")
    monkeypatch.setattr(picture, "DOCS", tmp_path)
    monkeypatch.setattr(picture, "FIRST", 0)
    nan = float("nan")
    broken = row("O3", status="diverged", reason="why", held_out_bits=None, losses=(8.0, 7.0, nan))
    run = result(row("O0", held_out_bits=4.5), broken)
    (tmp_path / "results.json").write_text(json.dumps(to_json(run)), encoding="utf-8")
    picture.main([str(tmp_path / "results.json")])
    drawn = (tmp_path / "demo-dark.svg").read_text(encoding="utf-8")
    assert ">4.500</text>" in drawn
    assert ">–</text>" in drawn
    assert len(re.findall("<path[^>]*stroke-linejoin", drawn)) == 2
    assert "nan" not in drawn
