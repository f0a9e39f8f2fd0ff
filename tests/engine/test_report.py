# SPDX-License-Identifier: BSD-3-Clause
"""An engine's own report, and what its history has of memory and casts."""

import gc
import math
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import preamp
from preamp.casting import CastAudit, reports
from preamp.numerics import (
    CastsRecord,
    MemoryRecord,
    NumericsRecord,
    OverflowRecord,
    Record,
    StepRecord,
)


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


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    loss = model(torch.ones(2, 4)).square().mean() * factor
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def started(level: str = "O2", **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    return preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def test_a_listener_that_fails_on_an_overflow_shifts_no_later_record() -> None:
    model, optimizer = started(numerics="light", numerics_every=50)
    engine = preamp.engine_of(optimizer)

    def fail(record: Record) -> None:
        if isinstance(record, OverflowRecord) and record.step == 2:
            raise RuntimeError("from a listener")

    engine.history.listen(fail)
    step(model, optimizer)
    with pytest.raises(RuntimeError, match="from a listener"):
        step(model, optimizer, math.inf)
    optimizer.zero_grad()
    step(model, optimizer)
    step(model, optimizer, math.inf)
    assert (engine.steps_applied, engine.steps_skipped) == (2, 2)
    records = engine.history.of(StepRecord)
    assert [(r.step, r.skipped) for r in records] == [(1, False), (2, True), (3, False), (4, True)]
    assert [math.isinf(r.losses[0]) for r in records] == [False, True, False, True]


def test_a_record_that_cannot_be_added_loses_no_applied_step() -> None:
    model, optimizer = started(numerics="light", numerics_every=1)
    engine = preamp.engine_of(optimizer)

    def fail(record: Record) -> None:
        if isinstance(record, MemoryRecord) and record.step == 2:
            raise OSError("no space left")

    engine.history.listen(fail)
    step(model, optimizer)
    with pytest.raises(OSError, match="no space"):
        step(model, optimizer)
    optimizer.zero_grad()
    step(model, optimizer)
    assert engine.steps_applied == 3
    assert [record.step for record in engine.history.of(StepRecord)] == [1, 2, 3]
    assert [record.step for record in engine.history.of(NumericsRecord)] == [1, 2, 3]


def test_memory_waits_for_the_first_step_that_is_taken() -> None:
    model, optimizer = started(numerics="light")
    engine = preamp.engine_of(optimizer)
    for factor in (math.inf, 1.0, math.inf, 1.0):
        step(model, optimizer, factor)
    (record,) = engine.history.of(MemoryRecord)
    assert record.step == 4
    assert record.categories["optimizer state"] > 2 * 4 * 10


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_models_with_sparse_buffers() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("graph", torch.eye(4).to_sparse_csr())
    optimizer = torch.optim.Adam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O1", verbosity=0, numerics="light")
    for _ in range(5):
        step(model, optimizer)
    (record,) = preamp.engine_of(optimizer).history.of(MemoryRecord)
    graph = model.graph
    parts = (graph.crow_indices(), graph.col_indices(), graph.values())
    held = sum(part.untyped_storage().nbytes() for part in parts)
    assert record.categories["buffers"] == held


class PairOfRates(torch.optim.Optimizer):
    """An optimizer with other ideas of a learning rate."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": (0.1, "slow")})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data -= 0.1 * param.grad


def test_a_learning_rate_of_an_unknown_kind_is_left_out() -> None:
    model = nn.Linear(4, 2)
    optimizer = PairOfRates(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0, numerics="light")
    step(model, optimizer)
    (record,) = preamp.engine_of(optimizer).history.of(StepRecord)
    assert record.lr is None


def test_an_audit_that_was_stopped_stays_off() -> None:
    before = reports._listeners
    audit = CastAudit()
    audit.start()
    audit.stop()
    audit.resume()
    assert reports._listeners == before
