# SPDX-License-Identifier: BSD-3-Clause
"""Pages are found from the first one, fit, run, and have the numbers of the committed rows."""

import inspect
import json
import re
from pathlib import Path

import pytest

import preamp
from alias.harness import Done, run_python
from code_blocks import blocks_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WIDEST = 88  # columns of a code block on the built pages
NOT_FOR_USERS = (DOCS / "design.md",)  # its chart of rooms is as wide as the source

LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)#\s\"]+)(?:#[^)]*)?[)\"]")
BLOCK = re.compile(r"^ *```.*?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def linked(page: Path) -> set[Path]:
    """Files under docs that a page links."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in links if "://" not in link}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_first_page_links_every_page() -> None:
    missing = set(PAGES) - {DOCS / "index.md"} - linked(DOCS / "index.md")
    assert sorted(map(name_of, missing)) == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert [name_of(target) for target in linked(page) if not target.exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {str(page.relative_to(DOCS)) for page in PAGES} == named


@pytest.mark.parametrize(
    "page",
    [page for page in (README, ROOT / "CONTRIBUTING.md", *PAGES) if page not in NOT_FOR_USERS],
    ids=name_of,
)
def test_code_fits_the_page(page: Path) -> None:
    blocks = [match[1] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    lines = [line for block in blocks for line in block.splitlines()]
    assert [line for line in lines if len(line) > WIDEST] == []


def test_every_argument_has_a_section() -> None:
    page = (DOCS / "arguments.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `(\w+)`$", page, re.MULTILINE)
    assert sorted(sections) == sorted(inspect.signature(preamp.initialize).parameters)


# -- blocks of Python run without an error or a warning --------------------------------------------


RUNNER = ROOT / "tools" / "code_blocks.py"
WITH_CODE = [page for page in (README, *PAGES) if blocks_of(page.read_text(encoding="utf-8"))]


def run_page(page: Path, folder: Path) -> Done:
    return run_python(("-W", "error", str(RUNNER), str(page)), folder)


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_broken_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n", "utf-8")
    done = run_page(page, tmp_path)
    assert done.returncode != 0
    assert f'"{page}", line 8' in done.stderr


def test_blocks_are_told_apart() -> None:
    text = "```sh\nls\n```\n<!-- not run: needs a GPU -->\n```python\na\n```\n```python\nb\n```\n"
    found = [(block.code, block.line, block.reason) for block in blocks_of(text)]
    assert found == [("a\n", 6, "needs a GPU"), ("b\n", 9, "")]


# -- measured numbers are those of the committed rows ----------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_first_table_is_the_latest_run_of_the_demo() -> None:
    newest = (ROOT / "benchmarks/results/demo.jsonl").read_text("utf-8").splitlines()[-1]
    levels = json.loads(newest)["levels"]
    columns = [levels[name] for name in ("O0", "autocast", "O5")]

    def row(name: str, form: str, values: list[float]) -> list[str]:
        return [name, *(form.format(value) for value in values), f"×{values[-1] / values[1]:.2f}"]

    def both(one: str, other: str) -> list[float]:
        return [level[one] + level[other] for level in columns]

    rows = [
        row("weights and gradients, bytes per parameter", "{:.0f}", both("weights", "gradients")),
        row(
            "masters and optimizer state, bytes per parameter",
            "{:.0f}",
            both("masters", "optimizer state"),
        ),
        row("sum", "{:.0f}", [level["sum"] for level in columns]),
        row("activations kept for the backward", "{:.1f} MiB", [one["kept"] for one in columns]),
        row("fastest step", "{:.1f} ms", [level["ms"] for level in columns]),
        row("held-out loss, bits per byte", "{:.3f}", [level["held_out"] for level in columns]),
    ]
    readme = list(map(cells, README.read_text("utf-8").splitlines()))
    assert [row for row in rows if row not in readme] == []


def printed_tables() -> tuple[list[list[str]], list[list[str]]]:
    """What ``benchmarks/table.py`` prints of times, without commits, and of scores."""
    done = run_python(("benchmarks/table.py",), ROOT, PYTHONPATH="benchmarks")
    assert done.returncode == 0, done.stderr
    lines = [cells(line) for line in done.stdout.splitlines() if line.startswith("| ")]
    start = next(at for at, line in enumerate(lines) if line[0] == "trained as")
    return [line[:-1] for line in lines[2:start]], lines[start + 2 :]


def test_the_tables_of_the_page_are_what_the_rows_say() -> None:
    times, scores = printed_tables()
    page = list(map(cells, (ROOT / "docs/speed.md").read_text("utf-8").splitlines()))

    def is_said(row: list[str]) -> bool:
        case, *rest = row
        several = [case.removeprefix("update of "), *rest]
        steps = [case, *rest[:5], rest[-1]]  # whole steps are not timed with split and compact
        return several in page or steps in page

    assert len(times) > 18
    assert len(scores) == 8
    assert [row for row in times if not is_said(row)] == []
    assert [row for row in scores if row not in page] == []


def range_of(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_sentences_about_speed_are_what_the_rows_say() -> None:
    times, _ = printed_tables()
    updates = [float(row[-1]) for row in times if row[0].startswith("update") and row[-1] != "–"]
    steps = [float(row[-1]) for row in times if not row[0].startswith("update") and row[-1] != "–"]
    plain = [row for row in times if row[0] in ("gpt", "convnet") and row[1] in ("O0", "O4", "O5")]
    text = " ".join((ROOT / "docs/speed.md").read_text("utf-8").split())
    assert f"An update with `FusedAdam` takes {range_of(updates)} of the time" in text
    assert f"A whole step at O5 takes {range_of(steps)} times as long as with autocast" in text
    over_hand = range_of([float(row[4]) / float(row[2]) for row in plain])
    assert f"preamp with the same AdamW takes {over_hand} times as long" in text


def test_the_hosts_update_is_what_the_rows_say() -> None:
    lines = (ROOT / "benchmarks/results/host.jsonl").read_text("utf-8").splitlines()
    moved = {row["name"]: f"{row['gb_s']:.1f}" for row in map(json.loads, lines)}
    copy, full, split, compact = (
        moved[f"{name}, 2 threads"] for name in ("copy", "full", "split", "compact")
    )
    text = " ".join((ROOT / "docs/storage.md").read_text("utf-8").split())
    assert f"a copy moved {copy} GB/s, the update of float32 state {full}, " in text
    assert f"of split masters {split}, and with 8-bit moments {compact} (" in text


def test_attribution_is_as_often_right_as_the_rows_say() -> None:
    lines = (ROOT / "benchmarks/results/attribution.jsonl").read_text("utf-8").splitlines()
    whole = {row["kind"]: row for row in map(json.loads, lines) if row["every"] == 1}
    assert all(row["right"] == row["cases"] for row in whole.values())
    text = " ".join((ROOT / "docs/overflow.md").read_text("utf-8").split())
    assert f"right for all of {whole['parameter']['right']:,} overflows" in text
    backwards = whole["changing backwards"]
    assert f"{backwards['right']:,} of {backwards['cases']:,} were right" in text
