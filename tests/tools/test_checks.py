# SPDX-License-Identifier: BSD-3-Clause
"""The checks of docs and of the wheel find what is missing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

import check_wheel
from check_docs import main, undocumented, unexplained
from code_blocks import blocks_of


def documented() -> None:
    """Do nothing."""


def bare() -> None: ...


class Half:
    """Has a docstring, unlike its method."""

    def method(self) -> None: ...


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __all__=list(names))
    return made


def test_complete_module_has_no_gaps() -> None:
    home = module("m", documented=documented)
    assert undocumented(home, home, "# Page\n\n::: m.documented\n") == []


def test_gaps_are_named() -> None:
    home = module("m", documented=documented, bare=bare, Half=Half)
    found = undocumented(home, home, "::: m.bare\n::: m.Half\n")
    assert found == [
        "m.documented: no '::: m.documented' in docs/api",
        "m.bare: no docstring",
        "m.Half.method: no docstring",
    ]


def test_a_facade_may_point_at_the_original() -> None:
    home = module("m", documented=documented)
    facade = module("m.amp", documented=documented)
    assert undocumented(facade, home, "the same: `documented`") == []
    assert len(undocumented(facade, home, "nothing")) == 1


class Told:
    """Takes ``first``."""

    def method(self, first: int, second: int) -> None:
        """Take both."""


def test_arguments_that_nothing_tells_of_are_named() -> None:
    home = module("m", Told=Told, documented=documented)
    texts = {"m.Told": "", "m.documented": ""}
    assert unexplained(home, texts) == ["m.Told.method: nothing tells what 'second' is"]
    assert unexplained(home, {"m.Told": "`second` comes last"}) == []


def test_every_public_name_has_its_entry_and_every_argument_is_told() -> None:
    assert main() == 0


# -- the wheel --------------------------------------------------------------------------------


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
