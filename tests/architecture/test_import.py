# SPDX-License-Identifier: BSD-3-Clause
"""Importing preamp loads preamp, nothing else, and changes nothing in torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
names = {owner: {k: id(v) for k, v in vars(owner).items()}
         for owner in (torch, torch.Tensor, torch.nn.functional, torch.nn.Module)}
autocast = torch.is_autocast_enabled("cpu")
import %s
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "foreign": sorted(new - {"preamp"} - set(sys.stdlib_module_names)),
    "changed": [owner.__name__ for owner, old in names.items()
                if {k: id(v) for k, v in vars(owner).items() if k in old} != old],
    "autocast": torch.is_autocast_enabled("cpu") != autocast,
}))
"""

LIGHT = {"foreign": [], "changed": [], "autocast": False}


def what_import_does(module: str, path: str | None = None) -> dict[str, object]:
    prelude = f"import sys; sys.path.insert(0, {path!r})\n" if path else ""
    run = subprocess.run(
        [sys.executable, "-c", prelude + SCRIPT % module],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(run.stdout)


def test_import_is_light() -> None:
    assert what_import_does("preamp, preamp.amp") == LIGHT


def test_import_of_the_facades_is_light() -> None:
    facades = "fp16_utils optimizers multi_tensor_apply normalization parallel"
    modules = ", ".join(f"preamp.{name}" for name in facades.split())
    assert what_import_does(modules) == LIGHT


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("import iniconfig", "foreign", ["heavy_module", "iniconfig"]),
        ("import torch; torch.nn.functional.relu = None", "changed", ["torch.nn.functional"]),
        ("import torch; torch.set_autocast_enabled('cpu', True)", "autocast", True),
    ],
)
def test_a_heavy_import_is_found(text: str, field: str, value: object, tmp_path) -> None:
    (tmp_path / "heavy_module.py").write_text(text, encoding="utf-8")
    assert what_import_does("heavy_module", str(tmp_path))[field] == value


def test_apex_names_load_when_they_are_asked_for() -> None:
    script = """
import sys
import preamp
assert "preamp.compat.frontend" not in sys.modules and not hasattr(preamp, "nothing")
amp = preamp.amp
from preamp import amp as again
assert again is amp is sys.modules["preamp.amp"] is vars(preamp)["amp"]
try:
    preamp.nothing
except AttributeError as error:
    assert error.name == "nothing" and "'preamp' has no attribute 'nothing'" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_reads_files_of_apex_loads_when_it_is_asked_for() -> None:
    script = """
import sys
import preamp.checkpoint
assert "preamp.checkpoint.convert" not in sys.modules
assert not hasattr(preamp.checkpoint, "nothing")
assert "describe" not in vars(preamp.checkpoint)
from preamp.checkpoint import *
assert describe is sys.modules["preamp.checkpoint.convert"].describe
assert vars(preamp.checkpoint)["describe"] is describe
assert all(name in globals() for name in preamp.checkpoint.__all__)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
