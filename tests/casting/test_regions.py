# SPDX-License-Identifier: BSD-3-Clause
"""Where casts are active: model regions, thread-wide casts, disabled blocks, backward passes."""

import gc
import os
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from casting.probe import BF16, CPU, F16, F32, Probe, held, product
from preamp.casting import regions, thread_casts
from preamp.casting.autocast_state import WEIGHT_CACHE_KEEPS_GRADIENTS, AutocastState, nesting
from preamp.casting.regions import attach_cast_region, attach_plain_region
from preamp.casting.thread_casts import (
    CASTS,
    disable_casts,
    push_thread_casts,
    thread_casts_restored,
)
from preamp.core.undo import UndoStack

pytestmark = pytest.mark.usefixtures("function_casts")

DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}


class Script:
    """A program of acts; those of `Script.WITHIN` hold until their ``end``.

    An exception goes on behind the act that raised it, in the block that catches it.
    """

    def __init__(self, program: str) -> None:
        self.before, self.pushes = self.state(), list[UndoStack]()
        self.models = {name: Probe() for name in ("plain", *DTYPES)}
        held(attach_plain_region, self.models["plain"])
        self.regions = {
            name: held(attach_cast_region, self.models[name], CPU, dtype)
            for name, dtype in DTYPES.items()
        }
        self.acts = (act.split() for act in program.split(";"))
        self.play()
        assert self.state() == self.before
        assert not CASTS.pushes
        assert not thread_casts.PUSHED
        assert not thread_casts.FORWARDS_OPEN

    def play(self) -> None:
        for name, *given in self.acts:
            if name == "end":
                return
            getattr(self, name)(*given)

    @staticmethod
    def state() -> tuple[AutocastState, int]:
        return AutocastState.capture(), nesting()

    # -- acts that hold until their end

    def cast(self, dtype: str) -> None:
        """A forward of a model that is cast to ``dtype``; one of the same model may be in it."""
        self.models[dtype].inside = self.play
        self.models[dtype](torch.ones(2, 4))

    def plain(self) -> None:
        """A forward of a model of an engine that casts no functions."""
        self.cast("plain")

    def block(self, dtype: str) -> None:
        """The user's own."""
        off = {"enabled": False} if dtype == "off" else {"dtype": DTYPES[dtype]}
        with torch.autocast("cpu", **off):
            self.play()

    def disabled(self) -> None:
        with disable_casts():
            self.play()

    def restored(self) -> None:
        with thread_casts_restored():
            self.play()

    def backward(self) -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(lambda _: self.play())
        torch.autograd.backward(leaf * 2)

    def grad(self) -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(lambda _: self.play())
        torch.autograd.grad(leaf * 2, leaf)

    def thread(self) -> None:
        """On another thread."""
        errors = list[BaseException]()

        def run() -> None:
            try:
                self.play()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert not errors, errors

    def caught(self) -> None:
        with pytest.raises((KeyError, KeyboardInterrupt)):
            self.play()

    # -- others

    def fail(self) -> None:
        raise KeyError("planted")

    def interrupt(self) -> None:
        raise KeyboardInterrupt

    def push(self, dtype: str) -> None:
        self.pushes.append(UndoStack())
        push_thread_casts(CPU, DTYPES[dtype], self.pushes[-1])

    def pop(self, number: str = "-1") -> None:
        """End one of the casts that are left."""
        self.pushes.pop(int(number)).unwind()

    def close(self, dtype: str) -> None:
        """End the region of a model, as its engine does."""
        self.regions[dtype].remove()

    def sees(self, dtype: str) -> None:
        assert product() is DTYPES[dtype]

    def note(self) -> None:
        self.noted = self.state()

    def same(self) -> None:
        """The state is as noted."""
        assert self.state() == self.noted

    def plainly(self) -> None:
        """The state is that of the beginning."""
        assert self.state() == self.before

    def collected(self) -> None:
        """End the latest casts as the garbage collector does, in the middle of anything."""
        cycle = Probe()
        cycle.inside = cycle  # so that only the collector frees it
        weakref.finalize(cycle, self.pushes.pop().unwind)
        del cycle
        gc.collect()

    def forked(self) -> None:
        """A forked process, such as a loader's worker, starts without casts."""
        if hasattr(os, "fork"):
            child = os.fork()
            if not child:
                os._exit(self.state() != self.before or bool(CASTS.pushes))
            assert os.waitpid(child, 0)[1] == 0


THREE = "push bf16; push f16; push bf16; "
PROGRAMS = {
    "a model": "cast bf16; sees bf16; end; sees f32",
    "a model that ends in its forward": "cast bf16; close bf16; sees f32; end; sees f32",
    "an exception in a forward": "caught; cast bf16; fail; sees f32",
    "models nest and recur": "cast bf16; cast f16; sees f16; end; sees bf16; cast bf16; sees bf16; "
    "end; sees bf16; end; sees f32",
    "a thread": "push bf16; sees bf16; plainly; pop; sees f32",
    "another thread": "push bf16; thread; sees f32; end; pop",
    "ended first to last": THREE + "pop 0; sees bf16; pop 0; sees bf16; pop 0; sees f32",
    "ended last to first": THREE + "pop; sees f16; pop; sees bf16; pop; sees f32",
    "ended from the middle": THREE + "pop 1; sees bf16; pop 0; sees bf16; pop; sees f32",
    "plain models": "push bf16; plain; sees f32; end; cast bf16; plain; sees f32; end; sees bf16; "
    "end; pop; cast bf16; plain; sees f32; end; sees bf16; end",
    "a plain model in a user's block": "push bf16; block f16; plain; sees f16; end; end; pop",
    "a plain model in a user's block in a model": "cast bf16; block f16; plain; sees f16; end; "
    "end; end",
    "disabled": "push bf16; disabled; caught; disabled; fail; sees f32; cast bf16; sees f32; end; "
    "end; sees bf16; cast bf16; sees bf16; end; pop",
    "disabled in a model": "cast bf16; disabled; sees f32; end; sees bf16; end",
    "disabled without an engine": "block bf16; disabled; sees bf16; end; end",
    "a closure in a step": "push bf16; disabled; disabled; restored; sees bf16; cast bf16; "
    "sees bf16; end; end; sees f32; cast bf16; sees f32; end; end; end; restored; sees bf16; end; "
    "pop",
    "a worker": "push bf16; forked; sees bf16; pop",
    "a worker of a forward": "push bf16; cast f16; forked; end; sees bf16; pop",
    "a worker where casts are off": "push bf16; disabled; forked; end; sees bf16; pop",
    "ended anywhere": "push bf16; pop; plainly",
    "ended by another thread": "push bf16; thread; pop; end; sees f32; plainly",
    "ended in a forward": "push bf16; cast f16; pop; sees f16; end; plainly",
    "a backward": "push bf16; backward; sees f32; end; grad; sees f32; end; sees bf16; pop",
    "ended in a backward": "push bf16; backward; pop; sees f32; end; plainly",
    "changed where casts are off": "push bf16; disabled; pop; push f16; sees f32; end; sees f16; "
    "pop",
    "ended in a user's block": "push bf16; block f16; note; pop; sees f16; same; end; sees f32",
    "begun and ended in a user's block": "block f16; note; push bf16; sees f16; pop; sees f16; "
    "same; end; plainly",
    "more begun in a user's block": "push bf16; block off; pop; push f16; sees f32; end; "
    "sees f16; pop; sees f32",
    "begun in a user's block that has ended": "block f16; push bf16; end; sees bf16; pop; plainly",
    "collected in a forward": "push bf16; cast f16; collected; sees f16; end; plainly",
    # Ctrl-C
    "interrupted in another thread": "thread; caught; cast bf16; cast f16; interrupt; plainly; end",
    "interrupted": "caught; cast bf16; cast f16; interrupt; plainly",
    "interrupted in a thread's casts": "push bf16; note; caught; cast bf16; cast f16; interrupt; "
    "same; pop",
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons, with threads
@pytest.mark.parametrize("name", PROGRAMS)
def test_where_casts_are_active(name: str) -> None:
    Script(PROGRAMS[name])


@pytest.mark.parametrize("act", ["cast bf16", "plain"])
@pytest.mark.parametrize("when", [0, 1], ids=["begins", "ends"])
def test_an_interrupt_in_a_hook_ends_its_forward(
    act: str, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = AutocastState.restore, list[int]()

    def restore(state: AutocastState) -> None:
        original(state)
        if len(thread_casts.CASTS.brackets) == 2:
            calls.append(0)
            if len(calls) == when + 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(AutocastState, "restore", restore)
    Script(f"note; caught; cast f16; {act}; end; end; same")
    assert len(calls) > when


def test_torch_catches_interrupts_during_forwards_only() -> None:
    names = vars(nn.modules.module)
    seen: list[object] = []
    model = Probe(lambda: seen.append(names["Exception"]))
    held(attach_cast_region, model, CPU, BF16)
    model(torch.ones(2, 4))
    Script(PROGRAMS["interrupted"])
    assert seen == [BaseException]
    assert "Exception" not in names


def test_weights_replaced_between_forwards_are_seen() -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    outputs = []
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.linear.weight.fill_(value)
            model.linear.bias.zero_()
        outputs.append(model(torch.ones(1, 4))[0, 0].item())
        outputs.append(F.linear(torch.ones(1, 4), model.linear.weight)[0, 0].item())
    handle.remove()
    assert outputs == [4.0, 4.0, 8.0, 8.0, 12.0, 12.0]


@pytest.mark.skipif(not WEIGHT_CACHE_KEEPS_GRADIENTS, reason="this torch's cache is not used")
def test_weight_is_cast_once_in_a_forward() -> None:
    model = Probe()
    outputs: list[torch.Tensor] = []
    model.inside = lambda: outputs.append(model.linear(torch.ones(2, 4)))
    held(attach_cast_region, model, CPU, BF16)
    outputs.append(model(torch.ones(2, 4)))
    nodes: set[Any] = set()
    stack: list[Any] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [parent for parent, _ in node.next_functions]
    casts = [node for node in nodes if type(node).__name__ == "ToCopyBackward0"]
    assert len(casts) == 2  # weight and bias


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("first_use", [torch.no_grad, torch.inference_mode])
def test_gradients_flow_when_a_weight_was_first_used_without_grad(
    dtype: torch.dtype, first_use: Any
) -> None:
    model = Probe()
    model.inside = lambda: first_use()(model.linear)(torch.ones(2, 4))
    held(attach_cast_region, model, CPU, dtype)
    model(torch.ones(2, 4)).float().sum().backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.tolist() == [[2.0] * 4] * 4


def test_weight_cache_stays_off_where_it_loses_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "WEIGHT_CACHE_KEEPS_GRADIENTS", False)
    seen: list[bool] = []
    model = Probe(lambda: seen.append(torch.is_autocast_cache_enabled()))
    held(attach_cast_region, model, CPU, BF16)
    output = model(torch.ones(2, 4))
    assert seen == [False]
    assert output.dtype is BF16


def test_models_run_in_several_threads_at_once() -> None:
    barrier = threading.Barrier(2, timeout=20)
    models = {dtype: Probe(barrier.wait) for dtype in (BF16, F16)}
    outputs: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = {}
    for dtype, model in models.items():
        held(attach_cast_region, model, CPU, dtype)

    def run(dtype: torch.dtype) -> None:
        outputs[dtype] = (models[dtype](torch.ones(2, 4)).dtype, product())

    threads = [threading.Thread(target=run, args=(dtype,)) for dtype in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outputs == {BF16: (BF16, F32), F16: (F16, F32)}
