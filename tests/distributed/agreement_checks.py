# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of ranks that do not train the same: both are told, and what differs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import preamp
from kit.refusals import assert_refused
from preamp.parallel import DistributedDataParallel

TORCH = nn.parallel.DistributedDataParallel


class Named(nn.Module):
    """Linear layers in an order of their own."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.children()]).sum()


def by_rank(*choices: Any) -> Any:
    return choices[dist.get_rank()]


def _first_step(
    wrap: Any, model: nn.Module | None = None, optimizer: Any = torch.optim.SGD, **arguments: Any
) -> None:
    model = Named(a=2, b=2) if model is None else model
    updated = optimizer(model.parameters(), lr=0.1)
    preamp.initialize(
        model, updated, **{"opt_level": "O1", "loss_scale": 8.0, "verbosity": 0, **arguments}
    )
    try:
        wrap(model)(torch.ones(1, 2))
    finally:
        preamp.engine_of(updated).close()


def _first_forward(wrap: Any, model: nn.Module) -> None:
    wrap(model)(torch.ones(1, 2))


def _refused(name: str, call: Callable[..., Any], *args: Any, **arguments: Any) -> None:
    assert_refused("distributed", name, lambda: call(*args, **arguments))


def check_levels() -> None:
    for wrap in (TORCH, DistributedDataParallel):
        _refused("levels O1 and O4", _first_step, wrap, opt_level=by_rank("O1", "O4"))


def check_levels_whose_weights_have_other_dtypes() -> None:
    level = by_rank("O2", "O1")
    _refused("levels O2 and O1", _first_step, DistributedDataParallel, opt_level=level)
    level = by_rank("O2", "O5")
    for wrap in (TORCH, DistributedDataParallel):
        _refused("levels O2 and O5", _first_step, wrap, opt_level=level)


def check_policies_and_scales() -> None:
    for wrap in (TORCH, DistributedDataParallel):
        options = {"loss_scale": "dynamic", "min_loss_scale": by_rank(None, 2.0)}
        _refused("floors of the scale", _first_step, wrap, **options)
        _refused("static scales", _first_step, wrap, loss_scale=by_rank(8.0, 4.0))


def check_counts_towards_a_higher_scale() -> None:
    """A file that one rank alone has loaded would let its scale grow before the others'."""
    for wrap in (TORCH, DistributedDataParallel):
        model = Named(a=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        engine = preamp.engine_of(optimizer)
        if dist.get_rank() == 1:
            engine.scalers[0].load_state_dict({"loss_scale": 65536.0, "unskipped": 7})
        _refused("counts towards a higher scale", _first_forward, wrap, model)
        engine.close()


def check_states_that_are_loaded_later() -> None:
    for wrap in (TORCH, DistributedDataParallel):
        model = Named(a=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        engine, wrapped = preamp.engine_of(optimizer), wrap(model)
        wrapped(torch.ones(1, 2)).backward()
        optimizer.zero_grad()
        scale = by_rank(8.0, 4.0)
        engine.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 0}})
        _refused("scales loaded later", wrapped, torch.ones(1, 2))
        engine.close()


def check_parameters() -> None:
    for wrap in (TORCH, DistributedDataParallel):
        model = by_rank(Named(a=2, b=2), Named(a=2, c=2))
        _refused("parameters of other names", _first_step, wrap, model)
        model = by_rank(Named(a=2, b=2), Named(b=2, a=2))
        _refused("parameters in another order", _first_step, wrap, model)
        kind = by_rank(torch.optim.SGD, torch.optim.Adam)
        _refused("optimizers of other kinds", _first_step, wrap, optimizer=kind)
    model = by_rank(Named(a=2), Named(a=3))
    _refused("parameters of other shapes", _first_step, DistributedDataParallel, model)


def check_a_rank_without_preamp() -> None:
    def without() -> None:
        DistributedDataParallel(Named(a=2))

    def with_one() -> None:
        _first_step(DistributedDataParallel, Named(a=2))

    _refused("a rank without preamp", by_rank(with_one, without))


def check_initialize_itself_asks_nobody() -> None:
    """Ranks of a pipeline have different models, and some may have none."""
    if dist.get_rank() == 0:
        model = Named(a=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        loss = model(torch.ones(1, 2))
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        preamp.engine_of(model).close()


def check_evaluating_on_one_rank_asks_nobody() -> None:
    model = Named(a=2)
    preamp.initialize(model, opt_level="O2", verbosity=0)
    wrapped = TORCH(model)
    if dist.get_rank() == 0:
        wrapped.eval()
        wrapped(torch.ones(1, 2))
        with torch.no_grad():
            wrapped.train()(torch.ones(1, 2))
    wrapped.train()(torch.ones(1, 2)).backward()
    preamp.engine_of(model).close()
