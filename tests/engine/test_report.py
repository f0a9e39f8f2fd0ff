# SPDX-License-Identifier: BSD-3-Clause
"""An engine's own report, and what its history has of memory and casts."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import preamp
from preamp.numerics import NumericsRecord, OverflowRecord, Record, StepRecord


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


def test_page_of_a_closed_engine(tmp_path: Path) -> None:
    _, engine = train("O5", 3, numerics="light")
    engine.close()
    engine.report(str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").stat().st_size > 1000


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
        if isinstance(record, NumericsRecord) and record.step == 2:
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


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_models_with_sparse_buffers() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("graph", torch.eye(4).to_sparse_csr())
    optimizer = torch.optim.Adam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    graph = model.graph
    parts = (graph.crow_indices(), graph.col_indices(), graph.values())
    held = sum(part.untyped_storage().nbytes() for part in parts)
    assert preamp.count_memory(model)["buffers"] == held


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
