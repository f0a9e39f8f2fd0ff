# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a legal script does to its tensors, it does while modules are watched as well."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import preamp

Program = Callable[[Any, Any, list[Any]], None]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Is given the model, a master and a list for what it finds; called with gradients off."""
    PROGRAMS[function.__name__] = function
    return function


# -- views of masters -----------------------------------------------------------------------------


@program
def views(model: Any, master: Any, found: list[Any]) -> None:
    master[0].zero_()
    master[1] = 0.5
    master[[0, 1]] = 0.25
    first, second, *_ = master.unbind(0)
    first.mul_(1.5)
    second.lerp_(first.clone(), 0.5)
    for part in master.chunk(2):
        part.add_(0.125)
    cast("Any", torch)._foreach_mul_([master[0], master[1]], 0.5)
    torch.add(master[0], 1.0, out=master[1])
    nn.init.constant_(master[:1], 0.5)
    view = master[0]
    master.mul_(0.5)
    found += [view.clone(), view.sum(), model(view[None])]


@program
def results_and_data(model: Any, master: Any, found: list[Any]) -> None:
    with torch.enable_grad():
        result = model(torch.ones(2, 4))
        first, _ = result.unbind(0)
        result.mul_(2.0)
    found += [first.clone(), model(first[None])]
    master.data[0].zero_()
    master.detach()[1].mul_(2)
    master.data = master.data * 0.5
    weight = next(model.parameters())
    weight[0].zero_()
    weight.t().mul_(0.5)


# -- other tensors --------------------------------------------------------------------------------


@program
def inference(model: Any, master: Any, found: list[Any]) -> None:
    with torch.inference_mode():
        result = model(torch.ones(2, 4))
        result[0].add_(1)
        (result * 2)[:1].mul_(3)
        found.append(result + 1)
    found.append(result * 2)


@program
def transforms(model: Any, master: Any, found: list[Any]) -> None:
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    beside = torch.ones(4, 4)
    x = torch.ones(3, 4)

    def call(weights: Any, x: Any) -> Any:
        return functional_call(model, weights, (x[None],)).float().sum()

    found += grad(call)(weights, x[0]).values()
    found.append(vmap(call, in_dims=(None, 0))(weights, x))
    found.append(vmap(lambda row: (row.clone().mul_(2) * beside).sum())(master.detach()))
    found += jvp(lambda w: w.clone().mul_(2) + beside, (beside,), (beside,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(beside, beside) * 2
        found.append(forward_ad.unpack_dual(dual).tangent)
    found.append(dual)


@program
def graphs(model: Any, master: Any, found: list[Any]) -> None:
    beside = torch.ones(2)
    graph = make_fx(lambda x: (x * beside).sin()[0])(torch.ones(2))
    found.append([node.name for node in graph.graph.nodes if node.op == "call_function"])


@program
def fakes(model: Any, master: Any, found: list[Any]) -> None:
    weight = next(model.parameters())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(torch.ones(3, 4))
        found.append(model(fake).shape)
        found.append(weight.t().shape)
        (fake @ fake.t())[0].zero_()
    with FakeTensorMode() as mode:
        mode.from_tensor(master).t().mul_(2)


@program
def without_memory(model: Any, master: Any, found: list[Any]) -> None:
    meta = torch.ones(3, 3, device="meta")
    (meta @ meta)[0].zero_()
    freed = master.detach().clone() * 2
    freed.untyped_storage().resize_(0)
    found += [freed.shape, freed.size(0), freed.detach().numel(), nn.Identity()(freed).shape]


@program
def layouts(model: Any, master: Any, found: list[Any]) -> None:
    sparse = torch.eye(4).to_sparse()
    sparse.mul_(2)
    sparse.coalesce().values().mul_(2)
    found.append(torch.sparse.mm(sparse, master.detach()[:4].float()))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    nested.mul_(2)
    found += [*(nested * 2).unbind()]
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    found += [*(jagged * 2).unbind()]


@program
def dtypes(model: Any, master: Any, found: list[Any]) -> None:
    values = torch.ones(3, dtype=torch.complex64)
    values.mul_(2)
    values.real.mul_(2)
    values.conj().mul_(1)
    values.conj().imag.neg_()
    found += [values, values * 1j, cast("Any", torch)._neg_view(values) * 2]
    found.append(torch.ones(4).to(torch.float8_e4m3fn).view(torch.uint8).zero_())


class Listening(torch.Tensor):
    """Hears of what is done to it, and will not be asked some things."""

    heard: Sequence[str] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__":
            Listening.heard = [*Listening.heard, func.__name__]
        else:
            assert func.__self__.__name__ not in ("grad_fn", "is_leaf", "_version")
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def subclasses(model: Any, master: Any, found: list[Any]) -> None:
    Listening.heard = ()
    special = torch.ones(2, 4).as_subclass(Listening)
    double = special * 2
    double[0].zero_()
    found += [double.as_subclass(torch.Tensor), nn.Identity()(double).as_subclass(torch.Tensor)]
    found.append(Listening.heard)


class Programmed(nn.Module):
    """Runs a program in its forward as well, where all functions are heard."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.run: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.run is not None:
            run, self.run = self.run, None
            with torch.no_grad():
                run()
        return self.layers(x)


def results(level: str, run: Program, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = Programmed()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    found: list[Any] = []
    loss = torch.zeros(())
    for index in range(3):
        master = next(iter(preamp.master_params(optimizer)))
        if index == 1:
            with torch.no_grad():
                run(model, master, found)
        if index == 2:
            model.run = lambda master=master: run(model, master, found)
        loss = model(torch.randn(3, 4)).float().square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    found += [loss, *model.parameters(), *preamp.master_params(optimizer), torch.rand(1)]
    return [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in found]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_legal_program_runs_as_it_does_unwatched(name: str, level: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = results(level, PROGRAMS[name])
        watched = results(level, PROGRAMS[name], overflow="trace")
    assert len(plain) == len(watched)
    for one, other in zip(plain, watched, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other
