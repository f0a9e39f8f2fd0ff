# SPDX-License-Identifier: BSD-3-Clause
"""The device that ``make test-device`` pretends: values read too early are wrong, waits raise."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases.waits import waits_refused
from devices.host_runs import Apart
from devices.test_steps import LOOPS, WARM_UP, capturable
from kit import run as kit

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


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_captured_step_asks_nothing_in_triton(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking an event, or for pinned memory, would end a capture; steps are done here meanwhile."""
    run = capturable(level).train(LOOPS["clipped"], 0, WARM_UP)

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    before = run.tensors()
    empty = torch.empty
    with monkeypatch.context() as patch, waits_refused():
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.cuda.Event, "query", refused)
        patch.setattr(torch.Tensor, "pin_memory", refused)
        patch.setattr(
            torch, "empty", lambda *a, **k: refused() if k.get("pin_memory") else empty(*a, **k)
        )
        run.play(LOOPS["clipped"], "zero")
    assert not torch.equal(run.tensors()["weight 0"], before["weight 0"])
    assert run.engine.steps_applied == WARM_UP


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_kernels_go_to_their_tensors_stream_in_triton(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of their own device, which is not the current one; and each stream has tables of its own."""
    run = kit.Run(level, "FusedAdam", Apart, loss_scale="dynamic")
    run.engine.scaler(0).set_scale(64.0)  # no overflow, which numpy warns of
    step = "backward; clip .5; step; zero filled"  # so that addresses are the same in the next one
    noted: list[tuple[int, torch.cuda.Stream, int]] = []
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    call = executor.__call__

    def noting(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        pointers: torch.Tensor = kwargs.get("pointers", args[0] if args else None)
        assert pointers.device.index == torch.cuda.current_device()
        noted.append((pointers.device.index, torch.cuda.current_stream(), pointers.data_ptr()))
        return call(kernel, *args, **kwargs)

    run.play(step, step)
    monkeypatch.setattr(executor, "__call__", noting)
    run.play(step)
    default, tables = [(device, stream) for device, stream, _ in noted], {at for *_, at in noted}
    assert set(default) == {(i, torch.cuda.default_stream(i)) for i in range(2)}
    noted.clear()
    assert run.engine.steps_applied == 3  # nothing holds the graphs of earlier steps
    side = [torch.cuda.Stream(i) for i in range(2)]
    with torch.cuda.stream(side[0]), torch.cuda.stream(side[1]), torch.cuda.device(0):
        run.play(step)
    assert [(device, stream) for device, stream, _ in noted] == [(i, side[i]) for i, _ in default]
    assert not tables & {at for *_, at in noted}
    assert torch.cuda.current_device() == 0


def test_memory_of_a_device_is_never_pinned() -> None:
    tensor = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        tensor.pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(3, device="cuda", pin_memory=True)
    assert not tensor.is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
