# SPDX-License-Identifier: BSD-3-Clause
"""The command line: options, refusals, which frames of a traceback it shows, and its width."""

import io
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner, Result

import preamp
from kit.refusals import assert_approved
from preamp.cli import main as main_module
from preamp.cli.app import app
from preamp.cli.console import print_table
from preamp.cli.run import own_part
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
    message = capsys.readouterr().err.rstrip("\n")
    assert_approved("cli", "a package that is missing", message)


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


LONG = "x" * 300
REFUSED = {
    "report nothing": "none.jsonl",
    "report a folder": "folder",
    "report of binary": "binary.jsonl",
    "report of an empty file": "empty.jsonl",
    "report of a text": "text.jsonl",
    "report a circle": "circle",
    "report in a circle": "circle/run.jsonl",
    "report to a folder": "run.jsonl -o folder",
    "report below a file": "run.jsonl -o run.jsonl/page.html",
    "report to a pipe": "run.jsonl -o pipe",
    "report to a long name": f"run.jsonl -o new/folder/{LONG}.html",
    "report to a long folder": f"run.jsonl -o new/{LONG}/page.html",
    "report to a circle": "run.jsonl -o circle",
    "report below a circle": "run.jsonl -o circle/page.html",
    "report to its run": "run.jsonl -o run.jsonl",
}


@pytest.mark.parametrize("name", REFUSED)
def test_report_refuses_what_it_cannot_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    done = invoke("report", *REFUSED[name].split())
    assert done.exit_code == 2
    assert_approved("cli", name, done.output.rstrip("\n"), long=LONG)
    assert sorted(Path().rglob("*")) == before
    assert Path("pipe").is_fifo()
    assert Path("run.jsonl").read_text(encoding="utf-8") == run


# -- tracebacks -------------------------------------------------------------------------------


def function_in(module: str, code: str) -> Callable[..., None]:
    """Define ``f`` in a module of this name, and in a file of the same name."""
    names = vars(ModuleType(module))
    exec(compile(f"def f(*given):\n    {code}\n", module, "exec"), names)
    return names["f"]


RUN, DOCTOR, TORCH = "preamp.cli.run", "preamp.doctor.probes", "torch.nn.modules"


@pytest.mark.parametrize(
    ("modules", "wanted"),
    [
        (("__main__", RUN, "train"), ["train"]),
        ((RUN, "train", "helper"), ["train", "helper"]),
        ((RUN, "train", TORCH, DOCTOR, "model"), ["train", TORCH, "model"]),
        ((RUN, "train", TORCH), ["train", TORCH]),
        ((RUN, "train", "preamp.engine.core"), ["train", "preamp.engine.core"]),
        ((RUN, "train", DOCTOR), ["train", DOCTOR]),
        ((RUN, DOCTOR, TORCH), [RUN, DOCTOR, TORCH]),
    ],
    ids=[
        "the script",
        "what it imports",
        "its model",
        "torch",
        "a refusal",
        "a bug of the doctor",
        "nothing of the script",
    ],
)
def test_the_script_is_shown_without_the_command(
    modules: tuple[str, ...], wanted: list[str]
) -> None:
    """These modules call each other, and the last one raises."""
    *outer, last = modules
    functions = [function_in(module, "given[0](*given[1:])") for module in outer]
    functions.append(function_in(last, "raise KeyError"))
    first, *others = functions
    with pytest.raises(KeyError) as caught:
        partial(first, *others)()
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_next is not None
    script = functions[modules.index("train")] if "train" in modules else function_in("none", "1")
    part = own_part(caught.value.__traceback__.tb_next, script.__code__)
    assert [frame.filename for frame in traceback.extract_tb(part)] == wanted


# -- width ------------------------------------------------------------------------------------


COLUMNS = pytest.mark.parametrize("columns", [60, 80, 120])
COMMANDS = {
    "estimate": ("estimate", "--params", "7e9", "--world-size", "8"),
    "help": ("--help",),
    "help of report": ("report", "--help"),
    "help of run": ("run", "--help"),
}
NUMBER = re.compile(r"\d[\d.,]*")


def printed(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


def widest(text: str) -> int:
    return max(cell_len(line.rstrip()) for line in text.splitlines())


@COLUMNS
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_follow_columns(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(monkeypatch, columns, *COMMANDS[command])
    code = [line for line in text.splitlines() if line.startswith("  ") and "preamp" in line]
    prose = "\n".join(line for line in text.splitlines() if line not in code)
    assert 20 < widest(prose) <= columns
    assert "…" not in prose.replace("xpu, …", "")


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_gets_all_numbers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (printed(monkeypatch, width, *COMMANDS["estimate"]) for width in (200, columns))
    assert set(NUMBER.findall(wide)) == set(NUMBER.findall(narrow))


@pytest.mark.parametrize(
    ("columns", "heads"),
    [(30, ["name first second third"]), (20, ["name first second", "name third"])],
)
def test_a_table_goes_on_below_with_its_first_column(columns: int, heads: list[str]) -> None:
    console = Console(width=columns, record=True, file=io.StringIO())
    headings = ("name", "first", "second", "third")
    print_table(console, headings, [("[a]", "1", "22", "333"), ("b", "4", "55", "666")])
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert [line for line in lines if line.startswith("name")] == heads
    assert next(line for line in lines if line.startswith("[a]")).startswith("[a] 1 22")
