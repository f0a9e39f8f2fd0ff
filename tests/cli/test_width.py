# SPDX-License-Identifier: BSD-3-Clause
"""What commands print fits the columns that there are, and nothing is lost for that."""

from __future__ import annotations

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from preamp.cli.app import app
from preamp.cli.console import make_console, print_table
from preamp.doctor import RULES, explain_text

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


def test_a_wider_terminal_gets_wider_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("estimate", "help", "help of run"):
        narrow, wide = (printed(monkeypatch, width, *COMMANDS[command]) for width in (60, 120))
        assert widest(narrow) < widest(wide), command


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_gets_all_numbers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = (printed(monkeypatch, width, *COMMANDS["estimate"]) for width in (200, columns))
    assert set(NUMBER.findall(wide)) == set(NUMBER.findall(narrow))


def test_a_pipe_has_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.setattr("sys.__stdout__", None)
    assert make_console().width == 80


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


@COLUMNS
def test_texts_of_the_doctor(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for rule in RULES.values():
        _, *paragraphs = explain_text(rule).splitlines()
        assert widest("\n".join(paragraphs)) <= min(columns, 96)
