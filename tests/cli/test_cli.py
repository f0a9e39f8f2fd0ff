# SPDX-License-Identifier: BSD-3-Clause
"""The command line: options, refusals, which frames of a traceback it shows, and its width."""

import io
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

import preamp
from alias.harness import call
from kit.refusals import assert_approved
from preamp.cli import main as main_module
from preamp.cli.app import app
from preamp.cli.console import print_table
from preamp.cli.run import own_part
from preamp.numerics import History, StepRecord


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def printed(*arguments: str) -> str:
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_missing_packages_get_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "NEEDS", ("json", "no_such_package"))
    assert call(monkeypatch) == 1
    message = capsys.readouterr().err.rstrip("\n")
    assert_approved("cli", "a package that is missing", message)


def test_version_needs_no_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main_module, "NEEDS", ("no_such_package",))
    assert not call(monkeypatch, "--version")
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


def test_report_writes_a_page_for_one_run_or_several(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run.jsonl", 3.0, 2.0) for name in ("a", "b")]
    page = tmp_path / "new" / "page.html"
    for some, said in ((runs[:1], ["The loss went from 3 to 2."]), (runs, ["a/run", "b/run"])):
        told = printed("report", *map(str, some), "-o", str(page), "--title", "My <run>")
        assert f"Report: {page} (" in told
        text = page.read_text(encoding="utf-8")
        assert all(words in text for words in ("My &lt;run&gt;", *said))


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


# -- preamp estimate: what it prints, and refuses -------------------------------------------------


def found(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(printed("estimate", *arguments, "--json"))


FIT = "--params 3e9 --levels O5 --card-gib"
PAGES = {
    "estimate on ranks": "--params 7e9 --optimizer FusedAdam --world-size 8",
    "estimate a storage": "--params 1e6 --optimizer FusedAdam --storage compact",
    "estimate state on the host": (
        "--params 1e9 --optimizer FusedAdam --levels O5 --storage split --place host"
    ),
    "estimate what is smaller": "--params 1e9 --optimizer FusedAdam --levels O5",
    "estimate what fits": f"{FIT} 20 --host-gib 32 --optimizer FusedAdam",
    "estimate that nothing fits": f"{FIT} 1 --optimizer FusedAdam",
    "estimate what fits with the fused one": f"{FIT} 20 --host-gib 32 --optimizer AdamW(lr=0.01)",
    "estimate what fits with its momentum": f"{FIT} 17 --optimizer SGD(momentum=0.9)",
    "estimate an option that no fused one has": f"{FIT} 17 --optimizer AdamW(amsgrad=True)",
    "estimate one level that fits without": "--params 3e9 --card-gib 24 --levels O5,O3",
    "estimate an optimizer without a fused twin": f"{FIT} 24 --optimizer RMSprop",
    "estimate what the fused one would keep": "--params 3e9 --levels O2,O5",
    "estimate nothing of no optimizer": "--params 3e9 --levels O5 --optimizer none",
    "estimate gradients that wait": (
        "--params 5 --optimizer FusedAdam --release-gradients --place host"
    ),
    "estimate a very large model": "--params 1e18 --levels O2",
}


@pytest.mark.parametrize("name", PAGES)
def test_what_estimate_prints(name: str) -> None:
    """Word by word, wherever lines end."""
    told = " ".join(printed("estimate", *PAGES[name].split()).split())
    assert_approved("cli", name, re.sub("━+", "━", told))


def test_estimate_prints_json() -> None:
    share = 100 * 4  # of 200 elements
    model = "torch.nn:Linear(10, 20, bias=False)"
    options = ("--levels", "O0,O2", "--world-size", "2", "--sharding", "fsdp")
    o0, o2 = found(model, "--optimizer", "SGD(momentum=0.9)", *options)
    assert (o0["opt_level"], o0["parameters"], o0["optimizer_state"]) == ("O0", 200, share)
    assert (o2["weights"], o2["masters"], o2["sharding"]) == (200, share, "fsdp")
    assert {row["optimizer_state"] for row in found("--params", "10", "--optimizer", "none")} == {0}
    compact = found("--params", "1e6", "--optimizer", "FusedAdam", "--storage", "compact")
    assert {row["opt_level"]: row["total"] for row in compact} == dict.fromkeys(
        ("O2", "O5"), 8_062_892
    )
    options = ("--params", "1e9", "--optimizer", "FusedAdam", "--levels", "O5")
    (placed,) = found(*options, "--storage", "split", "--place", "host")
    assert (placed["on_device"], placed["on_host"]) == (4 * 10**9 + 12, 10 * 10**9 + 3 * 2**25)
    assert placed["total"] == 14 * 10**9 + 12
    # Of the host there is enough, if nothing is said.
    fits = found(*FIT.split(), "20", "--optimizer", "FusedAdam")
    assert [row["place"] for row in fits] == [*["host"] * 6]
    assert found(*FIT.split(), "20", "--host-gib", "32", "--optimizer", "AdamW(lr=0.01)") == []
    assert len(found("--params", "3e9", "--levels", "O2,O5")) == 2


def test_the_options_of_storage_are_the_arguments() -> None:
    storage = preamp.Storage(masters="split", moments="8bit", place="host", release_gradients=True)
    policy = preamp.OPT_LEVELS["O5"].replace(storage=storage)
    wanted = preamp.estimate(partial(nn.Linear, 4, 3), policy, "FusedAdam")
    options = ("--storage", "compact", "--place", "host", "--release-gradients")
    rows = found("torch.nn:Linear(4, 3)", "--optimizer", "FusedAdam", *options)
    assert [row["opt_level"] for row in rows] == ["O2", "O5"]
    assert rows[-1] == json.loads(json.dumps(wanted.to_json()))


UNKNOWN = {
    "estimate gradients released on the device": "--params 5 --release-gradients",
    "masters that no level has": ("--params 1e6 --optimizer FusedAdam --storage split --levels O1"),
    "estimate nothing": "",
    "estimate a model and a number": "torch.nn:Linear(2,2) --params 5",
    "estimate a model and no parameters": "torch.nn:Linear(2,2) --params 0",
    "estimate a model that is not there": "torch.nn:Linea(2,2)",
    "estimate a model that cannot be made": "torch.nn:Linear(2)",
    "estimate a model of no module": "Linear(2,2)",
    "estimate no parameters": "--params 0",
    "estimate too many parameters": "--params 1e30",
    "estimate nan parameters": "--params nan",
    "estimate an unknown level": "--params 5 --levels O9",
    "estimate unknown sharding": "--params 5 --sharding zero9",
    "estimate sharding of one rank": "--params 5 --sharding fsdp",
    "estimate an unknown optimizer": "--params 5 --optimizer Adm",
    "estimate an optimizer's failure": "torch.nn:Embedding(0,3) --optimizer Adafactor",
    "estimate an unknown storage": "--params 5 --storage foo",
    "estimate an unknown place": "--params 5 --place hots",
    "estimate a place for a foreign optimizer": "--params 5 --place host",
    "estimate a place and a card": "--params 5 --place host --card-gib 1",
    "estimate a host without a card": "--params 3e9 --host-gib 64",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_estimate_refuses(name: str) -> None:
    done = invoke("estimate", *UNKNOWN[name].split())
    assert done.exit_code == 2
    assert_approved("cli", name, done.output.rstrip("\n"))


# -- tracebacks -------------------------------------------------------------------------------


def function_in(module: str, code: str) -> Callable[..., None]:
    """Define ``f`` in a module of this name, and in a file of the same name."""
    names = vars(ModuleType(module))
    exec(compile(f"def f(*given):\n    {code}\n", module, "exec"), names)
    return names["f"]


RUN, DOCTOR, TORCH = "preamp.cli.run", "preamp.doctor.probes", "torch.nn.modules"


SHOWN: dict[str, tuple[tuple[str, ...], list[str]]] = {  # who calls whom, and what is shown of it
    "the script": (("__main__", RUN, "train"), ["train"]),
    "what it imports": ((RUN, "train", "helper"), ["train", "helper"]),
    "its model": ((RUN, "train", TORCH, DOCTOR, "model"), ["train", TORCH, "model"]),
    "torch": ((RUN, "train", TORCH), ["train", TORCH]),
    "a refusal": ((RUN, "train", "preamp.engine.core"), ["train", "preamp.engine.core"]),
    "a bug of the doctor": ((RUN, "train", DOCTOR), ["train", DOCTOR]),
    "nothing of the script": ((RUN, DOCTOR, TORCH), [RUN, DOCTOR, TORCH]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_script_is_shown_without_the_command(name: str) -> None:
    modules, wanted = SHOWN[name]
    *outer, last = modules  # which raises
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


COMMANDS = {
    "estimate": ("estimate", "--params", "7e9", "--world-size", "8"),
    "help": ("--help",),
    "help of report": ("report", "--help"),
    "help of run": ("run", "--help"),
}


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_follow_columns(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = printed(*COMMANDS[command])
    code = [line for line in text.splitlines() if line.startswith("  ") and "preamp" in line]
    prose = [line.rstrip() for line in text.splitlines() if line not in code]
    assert 20 < max(map(cell_len, prose)) <= columns
    assert "…" not in "\n".join(prose).replace("xpu, …", "")


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_gets_all_numbers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[set[str]] = []
    for width in (200, columns):
        monkeypatch.setenv("COLUMNS", str(width))
        numbers.append({*re.findall(r"\d[\d.,]*", printed(*COMMANDS["estimate"]))})
    assert numbers[0] == numbers[1]


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
