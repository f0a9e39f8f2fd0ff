# SPDX-License-Identifier: BSD-3-Clause
"""What an engine leaves undone while a CUDA graph is captured; no GPU is needed to see it.

The whole step, captured and replayed, is in ``tests/devices``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import preamp
from cases.host_reads import NoHostReads, far_from_the_host
from preamp.engine import ledger
from preamp.optim.fused import base, checks
from preamp.optimizers import FusedAdam, FusedLAMB


class _Event:
    """As ``torch.cuda.Event``; while a graph is captured, asking it anything fails."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.may_be_asked = True

    def record(self, stream: Any = None) -> None:
        self.stream = stream

    def query(self) -> bool:
        if not self.may_be_asked:
            raise RuntimeError("operation not permitted when stream is capturing")
        return True

    def synchronize(self) -> None:
        self.query()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with preamp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    with NoHostReads():
        optimizer.step()
    optimizer.zero_grad()


def test_a_captured_step_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flag would be read once, and replays never come by; earlier flags are not asked for."""
    far_from_the_host(monkeypatch)
    model = torch.nn.Linear(2, 1)
    optimizer = FusedAdam(model.parameters(), lr=0.125, capturable=True)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    engine = preamp.engine_of(model)
    engine.scaler(0).set_scale(8.0)
    _step(model, optimizer)
    event = engine.ledger._open[0].flag._event = _Event()
    before = model.weight.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "is_capturing", lambda _: True)
        event.may_be_asked = False
        _step(model, optimizer)
    event.may_be_asked = True
    assert not torch.equal(model.weight, before)
    assert engine.steps_applied == 1
    _step(model, optimizer)
    assert engine.steps_applied == 2
    assert optimizer.param_groups[0]["step"].item() == 3


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
def test_a_counter_of_the_host_is_not_captured(
    kind: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replays would be the same step; a tensor is counted, whatever the optimizer."""
    far_from_the_host(monkeypatch)
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.125)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    _step(model, optimizer)
    before = model.weight.detach().clone()
    for module in (base, checks):
        monkeypatch.setattr(module, "is_capturing", lambda _: True)
    with pytest.raises(preamp.PreampStateError) as refused:
        _step(model, optimizer)
    assert str(refused.value).startswith(
        "optimizer.step() was captured in a CUDA graph with group['step']=1. Replays see"
    )
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.zero_grad()
    group = optimizer.param_groups[0]
    group["step"] = torch.tensor(group["step"], dtype=torch.int32)
    _step(model, optimizer)
    assert int(group["step"]) == 2
    assert not torch.equal(model.weight, before)


def test_new_state_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would zero the moments."""
    far_from_the_host(monkeypatch)
    model = torch.nn.Linear(2, 1)
    optimizer = FusedAdam(model.parameters(), lr=0.125, capturable=True)
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    for module in (base, checks):
        monkeypatch.setattr(module, "is_capturing", lambda _: True)
    with pytest.raises(preamp.PreampStateError, match="state it would make or convert"):
        _step(model, optimizer)
    assert not any(optimizer.state.values())


def test_a_flag_is_waited_for_where_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the flag need not be the current one, and each has streams of its own."""
    value = torch.ones(())
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *_, **__: value.clone())

    class There:
        dtype = torch.float32
        device = torch.device("cuda", 1)

    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: value)
    flag: Any = ledger._Flag(There())  # pyright: ignore[reportArgumentType]
    assert flag._event.stream == "stream of cuda:1"
