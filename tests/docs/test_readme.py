# SPDX-License-Identifier: BSD-3-Clause
"""The Python blocks of the README and of the documentation run without an error or a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import blocks_of

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / "tools" / "code_blocks.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if blocks_of(page.read_text(encoding="utf-8"))]


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(page)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.full
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_code() -> None:
    assert ROOT / "README.md" in WITH_CODE


def test_a_broken_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\nx / 0\n```\n", "utf-8")
    done = run(page, tmp_path)
    assert done.returncode != 0
    assert f'"{page}", line 8' in done.stderr


def test_blocks_are_told_apart() -> None:
    text = "```sh\nls\n```\n<!-- not run: needs a GPU -->\n```python\na\n```\n```python\nb\n```\n"
    found = [(block.code, block.line, block.reason) for block in blocks_of(text)]
    assert found == [("a\n", 6, "needs a GPU"), ("b\n", 9, "")]
