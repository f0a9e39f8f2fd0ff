# SPDX-License-Identifier: BSD-3-Clause
"""``preamp bench``: a table, and rows that can be sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from preamp.cli import bench
from preamp.cli.app import app

SMALL = ("bench", "--device", "cpu", "--params", "5000", "--tensors", "2,3", "--seconds", "0")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})


def test_a_table_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = run(*SMALL, "--out", str(path))
    assert done.exit_code == 0, done.output
    copy, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (copy["name"], copy["device"]) == ("copy", "cpu")
    assert f"torch {torch.__version__}" in copy["versions"]
    assert [(row["tensors"], row["parameters"]) for row in rows] == [(2, 4096)] * 7 + [
        (3, 3072)
    ] * 7
    assert {row["status"] for row in rows} == {"measured"}
    storages = [row["name"] for row in rows[:7]]
    assert storages[0] == "torch GradScaler, AdamW"
    assert storages[1:4] == [f"preamp O2, {name}" for name in ("full", "split", "compact")]
    for row in rows:
        assert row["steps"] == 3
        assert 0 < row["host_ms"] <= row["step_ms"]
        assert row["share_of_copy"] == pytest.approx(row["gb_s"] / copy["gb_s"])
        assert row["name"] in done.output
    wanted = 30 * 4096 / rows[1]["step_ms"] / 1e6
    assert rows[1]["gb_s"] == pytest.approx(wanted)


def test_what_fails_is_told_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    step_of = bench._step_of  # pyright: ignore[reportPrivateUsage]

    def build(name: str, sizes: list[int], device: torch.device) -> Any:
        if name == "preamp O5, full":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")
        return step_of(name, sizes, device)

    monkeypatch.setattr(bench, "_step_of", build)
    done = run(*SMALL[:-3], "2", "--seconds", "0", "--out", str(path))
    assert done.exit_code == 1, done.output
    assert "preamp O5, full: OutOfMemoryError" in done.output
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["name"] for row in rows if row["status"] != "measured"] == ["preamp O5, full"]
    assert len(rows) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_by_name(tmp_path: Path) -> None:
    done = run("bench", "--gpu", "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 2
    assert "--device 'cuda' does not work here" in done.output
    assert list(tmp_path.iterdir()) == []


def test_where_rows_go_is_opened_before_anything_is_measured(tmp_path: Path) -> None:
    done = run(*SMALL, "--out", str(tmp_path / "missing" / "rows.jsonl"))
    assert done.exit_code == 2
    assert "No such file or directory" in done.output


def test_a_gpu_and_another_device_contradict_each_other(tmp_path: Path) -> None:
    done = run("bench", "--gpu", "--device", "cpu", "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 2
    assert "Leave one of the two out" in done.output


@pytest.mark.parametrize(
    "given", [("--tensors", "0"), ("--tensors", "x"), ("--params", "1"), ("--params", "inf")]
)
def test_sizes_that_do_not_go(given: tuple[str, str], tmp_path: Path) -> None:
    done = run("bench", "--device", "cpu", *given, "--out", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 2
    assert "Every tensor has at least one element" in done.output
    assert list(tmp_path.iterdir()) == []
