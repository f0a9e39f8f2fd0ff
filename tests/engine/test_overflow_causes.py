# SPDX-License-Identifier: BSD-3-Clause
"""Which parameter overflowed first: the named cause is right wherever the bad value came in."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import preamp
from cases.host_reads import far_from_the_host
from cases.models import Damage
from kit.loops import scaled_backward
from kit.run import Run
from preamp.core.torch_private.autograd import TELLS_HOOKS
from preamp.engine import ledger

levels = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])


class Model(nn.Module):
    """Words to a number; the gradients are made from the last line to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 4)
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(self.words(words))))


BACKWARD = ("last.weight", "middle.weight", "first.weight", "words.weight")
"""The order in which a backward makes the gradients."""


class Blamed(Run):
    """A run whose scale is low enough for nothing to overflow by itself."""

    def __init__(self, level: str = "O2", optimizer: str = "SGD", **options: Any) -> None:
        super().__init__(level, optimizer, **{"model": Model, "loss_scale": "dynamic", **options})
        for scaler in self.engine.scalers:
            scaler.set_scale(16.0)

    def loss(self, index: int = 0) -> torch.Tensor:
        return self.model(torch.arange(3)).float().sum()

    def damage(self, name: str) -> None:
        Damage(self.model.get_parameter(name), math.inf).armed = True

    @property
    def cause(self) -> preamp.OverflowCause:
        return self.engine.overflow_causes[-1]


# -- magnitudes --------------------------------------------------------------------------------


def test_float64_beyond_float32_is_no_overflow() -> None:
    run = Blamed("O0", model=lambda: Model().double(), cast_model_type=torch.float64)
    run.model.first.weight.register_hook(lambda grad: torch.full_like(grad, 1e300))
    run.damage("last.weight")
    run.iterate()
    assert run.cause.parameters == ("last.weight",)


# -- several backwards -------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("names", list(itertools.combinations(BACKWARD, 2)))
def test_the_order_is_that_of_the_very_backward(level: str, names: Sequence[str]) -> None:
    """Whatever the layers' order was in the steps before, and in which group they are."""
    run = Blamed(level)
    head = nn.Parameter(torch.ones(1))
    run.iterate()
    run.optimizer.add_param_group({"params": [head]})
    run.model.forward = lambda words: run.model.first(
        run.model.last.weight * run.model.middle.weight
    )
    made: list[str] = []
    for _ in range(2):
        for param in (head, *map(run.model.get_parameter, names)):
            Damage(param, math.inf).armed = True
        loss = (run.model(torch.arange(3)).float() * head).sum()
        made.clear()
        hooks = [
            param.register_post_accumulate_grad_hook(lambda p: made.append(run.engine.names.of(p)))
            for param in (head, *run.model.parameters())
        ]
        scaled_backward(loss, run.optimizer)
        for hook in hooks:
            hook.remove()
        run.play("step; zero")
        own = {*names, "optimizers[0].param_groups[1][0]"}
        assert run.cause.parameters == tuple(name for name in made if name in own)
        assert run.cause.candidates == 1


# -- where the order is not known --------------------------------------------------------------


def test_gradients_that_a_script_sets_itself(capsys: pytest.CaptureFixture[str]) -> None:
    run = Blamed(verbosity=1)

    def step(*bad: str) -> preamp.OverflowCause:
        with preamp.scale_loss(run.loss(), run.optimizer):
            for name, param in run.model.named_parameters():
                param.grad = torch.full_like(param, math.inf if name in bad else 1.0)
        run.play("step; zero")
        return run.cause

    assert step("middle.weight").candidates == 1
    capsys.readouterr()
    with preamp.scale_loss(torch.ones(1), run.optimizer):  # there was no graph at all
        for param in run.model.parameters():
            param.grad = torch.full_like(param, math.inf)
    run.play("step; zero")
    assert run.cause.candidates == 4
    assert (
        "in 'words.weight', 'first.weight', 'middle.weight', 'last.weight', all of which may have "
        "been the first;" in capsys.readouterr().out
    )


@pytest.mark.parametrize("retains", [False, True])
def test_a_graph_that_is_not_freed_is_not_kept(
    retains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the host learns of an overflow later, the activations would stay alive until then."""
    far_from_the_host(monkeypatch)
    run = Blamed(optimizer="FusedAdam")
    run.damage("first.weight")
    run.damage("last.weight")
    with preamp.scale_loss(run.loss(), run.optimizer) as scaled:
        scaled.backward(retain_graph=retains)
    run.optimizer.step()
    is_followed = not retains or not TELLS_HOOKS  # then the order is kept in the graph's place
    assert run.cause.candidates == (1 if is_followed else 2)
    if is_followed:
        assert run.cause.parameters == ("last.weight", "first.weight")


def test_a_checkpoint_that_is_retained_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a graph is freed is asked without unpacking what was saved."""
    far_from_the_host(monkeypatch)
    run, calls = Blamed(optimizer="FusedAdam"), list[int]()

    def loss() -> torch.Tensor:
        calls.append(1)
        return run.model(torch.arange(3)).float().square().sum()

    with preamp.scale_loss(checkpoint(loss, use_reentrant=False), run.optimizer) as scaled:
        scaled.backward(retain_graph=True)
    assert len(calls) == 2
    run.optimizer.step()
    assert len(calls) == 2


# -- what is made of a cause -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("first.weight",), "inf first in 'first.weight'; loss scale"),
        (
            ("first.weight", "last.weight", "middle.weight"),
            "inf first in 'last.weight' and in 2 more; loss scale",
        ),
    ],
)
def test_the_message(names: Sequence[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Blamed(verbosity=1)
    capsys.readouterr()
    run.iterate()
    for name in names:
        run.damage(name)
    run.iterate()
    assert capsys.readouterr().out == (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8.0 "
        f"(step 2: {text} 16.0 to 8.0)\n"
    )


# -- listeners ---------------------------------------------------------------------------------


def test_listeners_hear_in_order_where_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose outcome is known at once waits for those before it."""
    far_from_the_host(monkeypatch)
    monkeypatch.setattr(ledger._Flag, "has_come", lambda _: False)
    run = Blamed(optimizer="FusedAdam")
    heard, told = list[Any](), run.engine.ledger
    told.on_skip.append(lambda _, cause: heard.append(("cause", cause.step)))
    told.on_step.append(lambda _, step, skipped: heard.append((step, skipped)))
    run.damage("first.weight")
    run.iterate()
    run.step()  # without gradients: nothing to skip
    run.iterate()
    assert heard == []
    assert (run.engine.steps_skipped, run.engine.steps_applied) == (1, 2)
    assert heard == [("cause", 1), (1, True), (2, False), (3, False)]
    assert run.cause.parameters == ("first.weight",)
    assert run.cause.kinds == ("inf",)
