# SPDX-License-Identifier: BSD-3-Clause
"""On, off, and what else may be called apex."""

import importlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

import preamp
import preamp.amp.__version__  # which is an attribute of the package from then on
from alias.harness import written
from kit.refusals import refused
from preamp.compat.alias.finder import STARTUP
from preamp.compat.alias.table import REFUSED


def ours() -> dict[str, object]:
    """Everything that the alias may change."""
    roots = ("apex", "amp_C", "apex_C")
    modules = {k: v for k, v in sys.modules.items() if k.partition(".")[0] in roots}
    return {
        "modules": modules,
        "meta_path": list(sys.meta_path),
        "environment": os.environ.get("PYTHONPATH"),
        "amp": dict(vars(preamp.amp)),
        "distributions": sorted(d.name for d in metadata.distributions()),
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Remove what a test put in place."""
    before = ours()["meta_path"]
    yield
    preamp.remove_apex_alias()
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
        del sys.modules[name]  # a fake Apex, imported from a folder of the test
    assert ours()["meta_path"] == before


@pytest.mark.parametrize("path", [None, "/somewhere", f"/a{os.pathsep}/b"])
def test_remove_restores_everything(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    before = ours()
    preamp.install_apex_alias()
    once = ours()
    preamp.install_apex_alias()
    assert ours() == once != before
    importlib.import_module("apex")
    assert metadata.version("apex") == "0.1"
    for _ in range(2):
        preamp.remove_apex_alias()
        assert ours() == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("apex")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("apex")


def test_entries_added_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/first")
    preamp.install_apex_alias()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [STARTUP, "/first"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/new", os.environ["PYTHONPATH"]]))
    preamp.remove_apex_alias()
    assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/new", "/first"]


def test_metadata() -> None:
    preamp.install_apex_alias()
    assert metadata.version("apex") == metadata.version("Apex") == "0.1"
    assert metadata.metadata("apex")["Summary"] == "preamp under the name apex"
    assert metadata.files("apex") is None
    assert metadata.distribution("apex").locate_file("x") == Path("x")
    owners = metadata.packages_distributions()
    assert owners["apex"] == owners["amp_C"] == owners["apex_C"] == ["apex"]
    assert list(metadata.distributions(path=["/nowhere"])) == []
    assert metadata.version("torch")


# -- an installed Apex -----------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that Python imports from."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def today(site: Path) -> Path:
    """An Apex of today: no amp, but optimizers and a transformer of its own."""
    package, about = site / "apex", "Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n"
    written(package, "__init__.py", "from apex import optimizers\nmine = True\n")
    written(package, "optimizers/__init__.py", "class FusedAdam: mine = True\n")
    written(package, "transformer/__init__.py", "mine = True\n")
    written(site, "apex-0.9.dist-info/METADATA", about)
    return package


def check_completed(apex: ModuleType, package: Path) -> None:
    assert apex.mine
    assert apex.__file__ == str(package / "__init__.py")
    assert type(apex.__loader__).__name__ == "SourceFileLoader"
    assert apex.__spec__ is not None
    assert apex.__spec__.loader is apex.__loader__
    assert apex.optimizers.FusedAdam.mine
    assert importlib.import_module("apex.transformer").mine
    assert apex.amp.initialize is preamp.amp.initialize
    assert metadata.version("apex") == "0.9"
    assert importlib.import_module("apex.contrib").__name__ == "apex.contrib"
    with refused("alias", "import of what is replaced", module="apex.mlp", use=REFUSED["apex.mlp"]):
        importlib.import_module("apex.mlp")


def test_an_apex_without_amp_is_completed(today: Path) -> None:
    preamp.install_apex_alias()
    apex = importlib.import_module("apex")
    check_completed(apex, today)
    preamp.remove_apex_alias()
    assert not hasattr(apex, "amp")
    assert not hasattr(apex, "contrib")
    assert apex.optimizers.FusedAdam.mine
    assert sys.modules["apex"] is apex


def test_an_apex_without_amp_that_is_imported_already(today: Path) -> None:
    apex = importlib.import_module("apex")
    before = dict(vars(apex))
    preamp.install_apex_alias()
    check_completed(apex, today)
    preamp.remove_apex_alias()
    assert {k: v for k, v in vars(apex).items() if k != "transformer"} == before


def test_a_broken_apex_stays_broken(today: Path) -> None:
    today.joinpath("__init__.py").write_text("import no_such_extension\n", "utf-8")
    preamp.install_apex_alias()
    with pytest.raises(ModuleNotFoundError, match="no_such_extension"):
        importlib.import_module("apex")


@pytest.mark.parametrize("imported", [False, True])
def test_an_apex_with_amp_is_refused(today: Path, imported: bool) -> None:
    (today / "amp.py").write_text("", "utf-8")
    if imported:
        importlib.import_module("apex.amp")
    before = ours()
    with refused("alias", "an Apex with amp", path=today / "__init__.py"):
        preamp.install_apex_alias()
    assert ours() == before


def test_the_other_package_called_apex_is_replaced(site: Path) -> None:
    """The package index has an unrelated one, which people install by mistake."""
    written(site, "apex/__init__.py", "raise ImportError('pyramid')")
    for name in ("forms", "views"):
        written(site, f"apex/{name}.py", "")
    preamp.install_apex_alias()
    assert importlib.import_module("apex.amp").initialize is preamp.amp.initialize


def test_a_clone_beside_the_script_is_no_package(site: Path) -> None:
    written(site, "apex/apex/amp.py", "")
    preamp.install_apex_alias()
    assert importlib.import_module("apex.amp").initialize is preamp.amp.initialize


@pytest.mark.parametrize(
    "stub", [MagicMock(), ModuleType("apex"), None], ids=["mock", "module", "none"]
)
def test_a_stub_in_its_place_is_refused(stub: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", stub)  # type: ignore[arg-type]
    before = ours()
    with refused("alias", "another thing called apex", stub=repr(stub)):
        preamp.install_apex_alias()
    assert ours() == before
    monkeypatch.undo()
