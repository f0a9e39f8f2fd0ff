# SPDX-License-Identifier: BSD-3-Clause
"""The command line: options and refusals."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import preamp
from preamp.cli import main as main_module
from preamp.cli.app import app
from preamp.numerics import History, StepRecord


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_missing_packages_get_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "NEEDS", ("json", "no_such_package"))
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("Cannot import no_such_package. The preamp command needs")
    assert message.endswith("In a clone of preamp, run pip install '.[cli]'.\n")


def test_version_needs_no_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "NEEDS", ("no_such_package",))
    monkeypatch.setattr(sys, "argv", ["preamp", "--version"])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert not caught.value.code
    told = capsys.readouterr().out
    assert told.startswith(f"preamp {preamp.__version__}, torch {torch.__version__}, Python 3.")
    assert "preamp --version" in invoke("--help").output


def test_module_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["preamp", "estimate", "--params", "1e3"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("preamp", run_name="__main__")
    assert not caught.value.code
    assert "O5" in capsys.readouterr().out


def write_run(path: Path, *losses: float) -> Path:
    history = History(path)
    for number, loss in enumerate(losses, 1):
        history.add(StepRecord(step=number, losses={0: loss}, scales={0: 1.0}, skipped=False))
    return path


def test_report_writes_a_page_for_one_run(tmp_path: Path) -> None:
    run, page = write_run(tmp_path / "run.jsonl", 3.0, 2.0), tmp_path / "new" / "page.html"
    done = invoke("report", str(run), "-o", str(page), "--title", "My <run>")
    assert done.exit_code == 0, done.output
    assert f"Report: {page} (" in done.output
    text = page.read_text(encoding="utf-8")
    assert "My &lt;run&gt;" in text
    assert "The loss went from 3 to 2." in text


def test_report_compares_several_runs_by_the_names_of_their_files(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run.jsonl", 3.0, 2.0) for name in ("a", "b")]
    done = invoke("report", *map(str, runs), "-o", str(tmp_path / "page.html"))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "a/run" in text
    assert "b/run" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("none.jsonl",),
            ("Error: none.jsonl cannot be read: No such file or directory. It has to be a file",),
        ),
        (("folder",), ("Error: folder cannot be read: Is a directory", "Check the path and")),
        (("binary.jsonl",), ("Line 1 of binary.jsonl is not a record of a run", "Pass another")),
        (("run.jsonl", "-o", "folder"), ("Error: folder cannot be written: What is there is",)),
        (("run.jsonl", "-o", "run.jsonl/page.html"), ("run.jsonl/page.html cannot be written:",)),
        (
            ("run.jsonl", "-o", "pipe"),
            ("Error: pipe cannot be written: What is there is no regular file. It needs a",),
        ),
        (
            ("run.jsonl", "-o", f"new/folder/{'x' * 300}.html"),
            (f"Error: new/folder/{'x' * 300}.html cannot be written: File name too long. It",),
        ),
        (("run.jsonl", "-o", f"new/{'x' * 300}/page.html"), ("cannot be written: File name too",)),
        (("circle",), ("Error: circle cannot be read: Too many levels of symbolic links. It",)),
        (("circle/run.jsonl",), ("Error: circle/run.jsonl cannot be read: Too many levels of",)),
        (("run.jsonl", "-o", "circle"), ("Error: circle cannot be written: Too many levels",)),
        (
            ("run.jsonl", "-o", "circle/page.html"),
            ("circle/page.html cannot be written: Too many",),
        ),
        (("empty.jsonl",), ("empty.jsonl holds no record", "at least one line", "Pass the file")),
        (("text.jsonl",), ("Line 1 of", "is not a record of a run", "Pass another file")),
        (
            ("run.jsonl", "-o", "run.jsonl"),
            ("would replace run.jsonl", "a file of its own", "Pass for example -o report.html"),
        ),
    ],
)
def test_report_refuses_what_it_cannot_read(
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("run.jsonl"), 1.0).read_text(encoding="utf-8")
    Path("empty.jsonl").write_text("", encoding="utf-8")
    Path("text.jsonl").write_text("hello\n", encoding="utf-8")
    Path("binary.jsonl").write_bytes(bytes(range(255, 0, -1)))
    Path("folder").mkdir()
    Path("circle").symlink_to("circle")
    os.mkfifo("pipe")
    before = sorted(Path().rglob("*"))
    done = invoke("report", *arguments)
    assert done.exit_code == 2
    for part in parts:
        assert part in done.output
    assert sorted(Path().rglob("*")) == before
    assert Path("pipe").is_fifo()
    assert Path("run.jsonl").read_text(encoding="utf-8") == run
