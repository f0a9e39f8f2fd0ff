# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of ranks that do not train the same: both are told, and what differs."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import preamp
from distributed.ranks import RUNS_ON_CPUS, by_rank, each
from kit.engines import close_engines
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel

TORCH = nn.parallel.DistributedDataParallel
WRAPS = (TORCH, DistributedDataParallel)


class Named(nn.Module):
    """Linear layers in an order of their own."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.children()]).sum()


def start(model: nn.Module, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    updated = optimizer(model.parameters(), lr=0.1)
    options = {"opt_level": "O1", "loss_scale": 8.0, "verbosity": 0, **options}
    preamp.initialize(model, updated, **options)
    return preamp.engine_of(updated)


MODELS = {"ab": {"a": 2, "b": 2}, "ac": {"a": 2, "c": 2}, "ba": {"b": 2, "a": 2}}
MODELS |= {"2": {"a": 2}, "3": {"a": 3}}
OURS = (DistributedDataParallel,)
ROWS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    # what both ranks are told, whose wrapper, and what the ranks train
    "levels O1 and O4": (WRAPS, {"opt_level": ("O1", "O4")}),
    "levels O2 and O1": (OURS, {"opt_level": ("O2", "O1")}),
    "levels O2 and O5": (WRAPS, {"opt_level": ("O2", "O5")}),
    "floors of the scale": (WRAPS, {"loss_scale": ("dynamic",) * 2, "min_loss_scale": (None, 2.0)}),
    "static scales": (WRAPS, {"loss_scale": (8.0, 4.0)}),
    "parameters of other names": (WRAPS, {"model": ("ab", "ac")}),
    "parameters in another order": (WRAPS, {"model": ("ab", "ba")}),
    "optimizers of other kinds": (WRAPS, {"optimizer": (torch.optim.SGD, torch.optim.Adam)}),
    "parameters of other shapes": (OURS, {"model": ("2", "3")}),
}


def check_first_forwards() -> None:
    for name, (wraps, ranks) in ROWS.items():
        for wrap in wraps:
            mine = {key: by_rank(*values) for key, values in ranks.items()}
            model = Named(**MODELS[mine.pop("model", "ab")])
            start(model, **mine)
            with refused("distributed", name):
                wrap(model)(torch.ones(1, 2))
            close_engines()


def check_counts_towards_a_higher_scale() -> None:
    """A file that one rank alone has loaded would let its scale grow before the others'."""
    for wrap in each(WRAPS):
        engine = start(model := Named(a=2), opt_level="O2", loss_scale="dynamic")
        if dist.get_rank() == 1:
            engine.scalers[0].load_state_dict({"loss_scale": 65536.0, "unskipped": 7})
        with refused("distributed", "counts towards a higher scale"):
            wrap(model)(torch.ones(1, 2))


def check_states_that_are_loaded_later() -> None:
    for wrap in each(WRAPS):
        engine = start(model := Named(a=2), opt_level="O2", loss_scale="dynamic")
        wrapped = wrap(model)
        wrapped(torch.ones(1, 2)).backward()
        model.zero_grad()
        engine.load_state_dict({"loss_scaler0": {"loss_scale": by_rank(8.0, 4.0), "unskipped": 0}})
        with refused("distributed", "scales loaded later"):
            wrapped(torch.ones(1, 2))


def check_a_rank_without_preamp() -> None:
    model = Named(a=2)
    if dist.get_rank() == 0:
        start(model)
    with refused("distributed", "a rank without preamp"):
        DistributedDataParallel(model)(torch.ones(1, 2))


def check_initialize_itself_asks_nobody() -> None:
    """Ranks of a pipeline have different models, and some may have none."""
    if dist.get_rank() == 0:
        engine = start(model := Named(a=2), opt_level="O2")
        (optimizer,) = engine.optimizers
        with preamp.scale_loss(model(torch.ones(1, 2)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def check_evaluating_on_one_rank_asks_nobody() -> None:
    model = Named(a=2)
    preamp.initialize(model, opt_level="O2", verbosity=0)
    wrapped = TORCH(model)
    if dist.get_rank() == 0:
        wrapped.eval()(torch.ones(1, 2))
        with torch.no_grad():
            wrapped.train()(torch.ones(1, 2))
    wrapped.train()(torch.ones(1, 2)).backward()


SHARDED: dict[str, dict[str, Any]] = {
    "sharded levels": {"opt_level": ("O2", "O5")},
    "sharded scales": {"loss_scale": (8.0, 16.0)},
    "sharded widths": {"width": (1, 4)},
    "sharded optimizers": {"optimizer": (torch.optim.SGD, torch.optim.Adam)},
    "sharded parts": {"parts": (1, 2)},
}


def sharded(evaluates_first: bool = False, **ranks: tuple[Any, Any]) -> Any:
    """The first forward of a sharded model."""
    mine = {key: by_rank(*values) for key, values in ranks.items()}
    width, parts = mine.pop("width", 1), mine.pop("parts", 2)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, width, bias=False))
    for part in [*model.children()][:parts]:
        fully_shard(part)
    fully_shard(model)
    engine = start(model, **{"opt_level": "O2", **mine})
    if evaluates_first:
        with torch.no_grad():
            model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return engine


def check_first_sharded_forwards() -> None:
    """Told before anything is gathered, also after an evaluation has left weights gathered."""
    if not RUNS_ON_CPUS:
        return
    for name, ranks in SHARDED.items():
        with refused("distributed", name, changes=True):
            sharded(**ranks)
        close_engines()
    sharded()
    sharded(evaluates_first=True)
