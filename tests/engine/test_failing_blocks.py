# SPDX-License-Identifier: BSD-3-Clause
"""A ``scale_loss`` block that fails while it sets aside or unscales leaves nothing half done."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.levels import EXACT
from cases.pair import Pair
from cases.tolerances import assert_same
from preamp.kernels.by_device import ByDevice

levels = pytest.mark.parametrize("level", EXACT)


class Failing:
    """Lets an op run out of memory at its n-th call from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, op: str, call: int) -> None:
        original = getattr(ByDevice, op)
        self.failed = False
        calls = itertools.count()

        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                self.failed = True
                raise torch.OutOfMemoryError(op)
            return original(*args, **kwargs)

        monkeypatch.setattr(ByDevice, op, fail_once)


@levels
@pytest.mark.parametrize(
    ("op", "scale"), [("census", "dynamic"), ("scale_add_", "dynamic"), ("scale_add_", 128.0)]
)
@pytest.mark.parametrize("earlier", [False, True])
def test_gradients_are_those_from_before_the_block(
    level: str, op: str, scale: Any, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(level, loss_scale=scale)
    if earlier:
        pair.backward(0)
    before = pair.engine.loss_scale()
    failing = Failing(monkeypatch, op, 0)
    with pytest.raises(torch.OutOfMemoryError):
        pair.ours(1)
    assert failing.failed
    assert pair.engine.loss_scale() == before
    pair.check_grads()
    pair.step()
    pair.check("after the failed block")
    pair.zero()
    pair.train(2)
    pair.check("after another step")


@levels
@pytest.mark.parametrize("call", [0, 1])
def test_optimizers_of_one_block_fail_together(
    level: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second optimizer's failure takes the first one's unscaling back."""
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    preamp.initialize(models, optimizers, opt_level=level, loss_scale=128.0, verbosity=0)
    ones = torch.ones(1, 2)

    def backward(factor: float) -> None:
        loss = sum(model(ones).float().sum() for model in models) * factor
        with preamp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()

    backward(1.0)
    Failing(monkeypatch, "scale_add_", call)
    with pytest.raises(torch.OutOfMemoryError):
        backward(2.0)
    for optimizer in optimizers:
        for param in preamp.master_params(optimizer):
            assert_same(param.grad, torch.ones_like(param))


@levels
def test_a_delayed_accumulation_that_cannot_be_unscaled_is_dropped_whole(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(level, loss_scale=128.0)
    pair.backward(0)
    pair.ours(1, delay_unscale=True)
    Failing(monkeypatch, "scale_add_", 0)
    with pytest.raises(torch.OutOfMemoryError):
        pair.ours(2)
    pair.check_grads()
    pair.step()
    pair.check()


@levels
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_setting_aside_can_fail(
    level: str, interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving earlier gradients to the masters runs out of memory."""
    pair = Pair(level, loss_scale=128.0)
    pair.backward(0)

    def fail(*_: Any, **__: Any) -> Any:
        raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByDevice, "widen_add", fail)
        if preamp.engine_of(pair.model).has_masters:
            with pytest.raises(interrupt):
                pair.ours(1)
    pair.check_grads()
    pair.step()
    pair.check()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_forward_of_a_failed_block_is_forgotten(level: str) -> None:
    """What ran under ``no_sync`` in it is no reason for the scale to wait for other ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        wrapper = DistributedDataParallel(model)
        ones, engine = torch.ones(1, 2), preamp.engine_of(model)

        def backward(factor: float, error: Exception | None = None) -> None:
            loss = wrapper(ones).float().sum() * factor
            with preamp.scale_loss(loss, optimizer) as scaled:
                if error is not None:
                    raise error
                scaled.backward()

        backward(1.0)
        optimizer.step()
        with wrapper.no_sync(), pytest.raises(OSError, match="disk"):
            backward(1.0, OSError("disk"))
        before = engine.loss_scale()
        backward(float("inf"))
        assert engine.loss_scale() == before / 2
        optimizer.step()
        engine.close()
    finally:
        dist.destroy_process_group()
