# SPDX-License-Identifier: BSD-3-Clause
"""An engine's own report, and what its history has of memory and casts."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import preamp
from preamp.numerics import CastsRecord, MemoryRecord


def train(level: str, steps: int, **options: object) -> tuple[nn.Module, preamp.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    for _ in range(steps):
        with preamp.scale_loss(model(torch.randn(4, 8)).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, preamp.engine_of(optimizer)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_page_tells_the_run(level: str, tmp_path: Path) -> None:
    _, engine = train(level, 5, numerics="full", numerics_every=2)
    engine.report(tmp_path / "report.html", title="One & only")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "One &amp; only" in page
    assert f">{level}<" in page
    assert ("test_report.py:" in page.replace("<wbr>", "")) is (
        level == "O1"
    )  # the line that casts


def test_page_of_a_closed_engine(tmp_path: Path) -> None:
    _, engine = train("O5", 3, numerics="light")
    engine.close()
    engine.report(str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_memory_is_counted_once_there_is_optimizer_state() -> None:
    model, engine = train("O2", 7, numerics="light", numerics_every=3)
    records = engine.history.of(MemoryRecord)
    assert [record.step for record in records] == [2, 4, 7]
    count = sum(p.numel() for p in model.parameters())
    for record in records:
        held = record.categories
        assert (held["weights"], held["masters"], held["gradients"]) == (
            2 * count,
            4 * count,
            2 * count,
        )
        assert held["optimizer state"] >= 8 * count


def test_casts_are_those_of_measured_steps() -> None:
    _, engine = train("O1", 7, numerics="full", numerics_every=3)
    records = engine.history.of(CastsRecord)
    assert [record.step for record in records] == [1, 4, 7]
    per_step = 6  # an input, a weight and a bias of each layer
    calls = [sum(c.calls for c in r.casts if c.function == "linear") for r in records]
    assert calls == [per_step - 1, 2 * (per_step - 1), 3 * (per_step - 1)]


@pytest.mark.parametrize("options", [{}, {"numerics": "light"}])
def test_casts_are_not_counted_unless_asked_for(options: dict[str, object]) -> None:
    _, engine = train("O1", 3, **options)
    engine.close()
    assert not engine.history.of(CastsRecord)


def test_counting_casts_keeps_no_engine_alive() -> None:
    model, engine = train("O1", 2, numerics="full")
    gone = weakref.ref(engine)
    del model, engine
    gc.collect()
    assert gone() is None
