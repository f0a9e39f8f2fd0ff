# SPDX-License-Identifier: BSD-3-Clause
"""The check of the wheel keeps the repository away from what it runs, and notices failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import check_wheel
from code_blocks import blocks_of


def test_pages_have_code_to_run() -> None:
    for page in check_wheel.PAGES:
        text = (check_wheel.ROOT / page).read_text(encoding="utf-8")
        assert any(not block.reason for block in blocks_of(text))


def test_the_repository_is_not_on_the_path_of_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(check_wheel.ROOT / "src"))
    code = "import os, sys; sys.exit('PYTHONPATH' in os.environ or os.getcwd() in sys.argv[1])"
    check_wheel.call([sys.executable, "-c", code, str(check_wheel.ROOT)], tmp_path)


def test_a_command_that_fails_ends_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(folder: Path) -> Path:
        check_wheel.call([sys.executable, "-c", "raise SystemExit(7)"], folder)
        return folder

    monkeypatch.setattr(check_wheel, "build", build)
    monkeypatch.setattr(sys, "argv", ["check_wheel.py", "--keep", str(tmp_path / "new")])
    assert check_wheel.main() == 1
    assert "failed with status 7" in capsys.readouterr().err
