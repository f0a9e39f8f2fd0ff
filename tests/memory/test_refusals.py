# SPDX-License-Identifier: BSD-3-Clause
"""What cannot be estimated or counted."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from kit.refusals import assert_refused
from preamp.memory.optimizers import parse_call

RELEASING = preamp.Storage(place="host", release_gradients=True)
ON_HOST = preamp.Storage(place="host")
LOCK = threading.Lock()


class Odd(torch.optim.SGD):
    """Its state has one element more than the parameter."""

    def step(self, closure: Any = None) -> None:
        del closure
        for param in self.param_groups[0]["params"]:
            self.state[param]["odd"] = torch.zeros(param.numel() + 1)


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def of_values(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = mean(model, batch)
    return loss if loss.item() > 0 else -loss


def under_a_lock() -> Callable[..., torch.Tensor]:
    lock = LOCK

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with lock:
            return mean(model, batch)

    return loss_fn


def of(model: Any = 10, opt_level: Any = "O5", **arguments: Any) -> Callable[[], object]:
    """An estimate; its level has the ``storage`` that is given."""
    if storage := arguments.pop("storage", None):
        opt_level = preamp.OPT_LEVELS[opt_level].replace(storage=storage)
    return partial(preamp.estimate, model, opt_level, **arguments)


def peak(**arguments: Any) -> Callable[[], object]:
    """An estimate with activations."""
    return of(nn.Linear(8, 16), **{"loss_fn": mean, "batch": torch.ones(4, 8), **arguments})


REFUSED: dict[str, Callable[[], object]] = {
    "a text as model": of("GPT"),
    "a function that makes no model": of(lambda: 3),
    "half a parameter": of(0.5),
    "a half model": of(nn.Linear(2, 2).half()),
    "an unknown optimizer": of(optimizer="Adm"),
    "an argument without a name": of(optimizer="Adam(0.1)"),
    "an argument that is no literal": of(optimizer="Adam(lr=x)"),
    "an argument that the optimizer refuses": of(optimizer="Adam(lr=-1)"),
    "LBFGS": of(optimizer="LBFGS"),
    "a number as optimizer": of(optimizer=3),
    "an optimizer of no module": of(optimizer="nowhere:Adam"),
    "no rank": of(world_size=0),
    "unknown sharding": of(sharding="zero3"),
    "an unknown level": of(opt_level="O9"),
    "state of another size": of(nn.Linear(9, 9, bias=False), optimizer=Odd),
    "gradients released on ranks": of(storage=RELEASING, optimizer="FusedAdam", world_size=2),
    "a foreign optimizer on the host": of(storage=ON_HOST, optimizer="AdamW"),
    "a loss of values": peak(loss_fn=of_values),
    "a loss without a batch": peak(batch=None),
    "a peak of a sharded model": peak(world_size=2, sharding="fsdp"),
    "a loss that cannot be copied": peak(loss_fn=under_a_lock()),
    "a batch that cannot be copied": peak(
        loss_fn=lambda model, rows: mean(model, next(rows)), batch=(row for row in torch.ones(4, 8))
    ),
    "counting without an engine": lambda: preamp.count_memory(nn.Linear(8, 16)),
    "a factory of no module": lambda: parse_call("nowhere:f").import_function(),
    "a factory that is not there": lambda: parse_call("torch.nn:Linea").import_function(),
    "a factory that cannot be called": lambda: parse_call("math:pi").import_function(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused("memory", name, REFUSED[name])


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 3), lambda: nn.Linear(4, 3), 15], ids=["model", "function", "number"]
)
def test_an_optimizer_of_another_model(model: Any) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(4, 3).parameters())
    act = partial(preamp.estimate, model, "O5", optimizer)
    assert_refused("memory", "an optimizer of another model", act, optimizer)


FORMS = ("", "m:", "a b:c", "m:f(", "m:f(1", "m:f(1))", "m:f(x)", "m:f(open('x'))", "m:f(**{})")
MORE_FORMS = ("m:f(1)(2)", "m:f(1).g", "m:f;g()", "m:f(1) + f(2)")


@pytest.mark.parametrize("text", FORMS + MORE_FORMS)
def test_other_forms_of_a_factory(text: str) -> None:
    act = partial(parse_call, text)
    assert_refused("memory", "a factory in another form", act, text=repr(text))
