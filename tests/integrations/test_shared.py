# SPDX-License-Identifier: BSD-3-Clause
"""Without its framework an integration says what installs it; the engine's state goes along."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from code_blocks import Block, blocks_of
from integrations.contract import START, WARNINGS, Net, fork_ranks, make_optimizer, needs
from kit.refusals import refused
from preamp.integrations.shared import EngineScaler, framework

PACKAGES = {
    "accelerate": "pip install accelerate",
    "lightning": "pip install lightning",
    "transformers": "pip install transformers accelerate",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_framework_is_named_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"preamp.integrations.{name}", raising=False)
    with refused("integrations", "a missing framework", package=name, command=PACKAGES[name]):
        importlib.import_module(f"preamp.integrations.{name}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("import no_such_dependency", "No module named 'no_such_dependency'"),
        ("from json import no_such_name", "cannot import name 'no_such_name'"),
        ("import broken.no_such_part", "No module named 'broken.no_such_part'"),
    ],
)
def test_a_framework_that_fails_to_import_is_not_advised_to_be_installed(
    content: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with refused("integrations", "a framework that fails", reason=f"[…]{reason}[…]"):
        framework("broken", "broken")


def test_a_part_that_is_there_is_returned() -> None:
    assert framework("json.decoder", "json") is importlib.import_module("json.decoder")


def started(**options: Any) -> Any:
    model = Net()
    optimizer = make_optimizer(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", **START, **options)
    return preamp.engine_of(model), EngineScaler(optimizer)


def test_the_state_has_the_counters_of_the_engine_and_torchs_is_taken() -> None:
    engine, scaler = started()
    state = scaler.state_dict()
    state["preamp"]["steps"] = [{"applied": 7, "skipped": 2, "skips_in_row": 1}]
    scaler.load_state_dict(state)
    assert (engine.steps_applied, engine.steps_skipped) == (7, 2)
    assert scaler.state_dict() == state
    torchs = torch.amp.GradScaler("cpu", init_scale=32.0)
    torchs.scale(torch.ones(()))
    scaler.load_state_dict(torchs.state_dict())
    assert engine.loss_scale() == 32.0
    assert engine.steps_applied == 7


def test_off_there_is_no_state() -> None:
    _, scaler = started(enabled=False)
    assert scaler.state_dict() == {}


# -- each script of the page on frameworks runs as it stands ---------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@WARNINGS
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.reason)
def test_a_script_of_the_page_trains(block: Block, tmp_path: Path) -> None:
    needs(block.reason.removeprefix("needs "))

    def run(rank: int) -> bool:
        torch.manual_seed(rank)
        if "install_apex_alias" in block.code:  # which the package has to see when it is imported
            forget(block.reason.removeprefix("needs ").partition(".")[0])
        exec(compile(block.code, block.reason, "exec"), {"__name__": "__main__"})
        return True

    assert fork_ranks(run, tmp_path, 1) == [True]


def test_every_script_says_what_it_needs() -> None:
    assert len(BLOCKS) == 9
    assert all(block.reason.startswith("needs ") for block in BLOCKS)
