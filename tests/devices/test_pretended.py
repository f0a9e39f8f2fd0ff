# SPDX-License-Identifier: BSD-3-Clause
"""The device that ``make test-device`` pretends: values read too early are wrong, waits raise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cases.waits import waits_refused

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "pretended",
    reason="not on the pretended device",
)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.equal(x, x),
    ],
)
def test_waits_are_refused(wait: Callable[[torch.Tensor], object]) -> None:
    refused = pytest.raises(RuntimeError, match="called a synchronizing CUDA operation")
    with waits_refused(), refused:
        wait(torch.ones(3, device="cuda"))


def test_what_need_not_wait_does_not() -> None:
    with waits_refused():
        pinned = torch.ones(3).pin_memory()
        on_device = pinned.to("cuda", non_blocking=True) * 2
        pinned.copy_(on_device, non_blocking=True)
        on_device += torch.full((), 2.0, device="cuda")
    assert on_device.data_ptr() != pinned.data_ptr()


def test_a_copy_is_garbage_until_its_event_has_come() -> None:
    on_device = torch.arange(4.0, device="cuda")
    host = torch.empty(4, pin_memory=True).copy_(on_device, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    on_device.zero_()  # queued behind the copy
    assert host.isnan().all()
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert event.query()


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(1000, device="cuda:1")
    assert torch.cuda.memory_allocated() - before == 4000
    assert tensor.device.index == 1
    del tensor
    assert torch.cuda.memory_allocated() == before
