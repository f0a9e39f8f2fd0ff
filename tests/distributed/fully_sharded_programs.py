# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of programs under ``fully_shard``: each is the same one under DDP.

Ranks do the same arithmetic and reduce to the same mean, so whole weights are equal bitwise; with
norms, and where a part ends within a vector of the processor, up to the last bit. What
``torch.distributed.checkpoint`` reads and writes goes on bitwise.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import preamp
from cases.tolerances import assert_same
from distributed.fully_sharded_checks import batch, sgd
from distributed.ranks import each, shard, whole
from preamp import optimizers
from preamp.optimizers import FusedAdam
from preamp.parallel.LARC import LARC

STEPS = 3
LEVELS = ("O1", "O2", "O5")
LAST_BIT = 2e-7  # of weights around one, after three steps


class Net(nn.Module):
    """Three layers, the middle one recomputed if asked for, and a layer that nothing uses."""

    def __init__(self, *, recomputes: bool = False, freezes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.middle = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)
        self.idle = nn.Linear(3, 3)
        self.recomputes = recomputes
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
        self.first.requires_grad_(not freezes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recomputes:
            x = cast("Any", checkpoint)(self.middle, x, use_reentrant=False)
        else:
            x = self.middle(x)
        return self.last(x)


class Run:
    """A model in training on each rank's half of a batch."""

    def __init__(
        self, level: str, build: Any, is_sharded: bool, model: Net, first_only: bool, **options: Any
    ) -> None:
        self.model = shard(model) if is_sharded else model
        self.optimizer = build((model.first if first_only else model).parameters())
        options = {"loss_scale": "dynamic", "verbosity": 0} | options
        preamp.initialize(model, self.optimizer, opt_level=level, **options)
        self.engine = preamp.engine_of(self.optimizer)
        for scaler in self.engine.scalers:
            scaler.set_scale(2.0**10)
        wrap = DistributedDataParallel
        self.forward = model if is_sharded else wrap(model, find_unused_parameters=True)

    def backward(self, factor: float = 1.0, **options: Any) -> None:
        loss = self.forward(batch(dist.get_rank())).float().mean() * factor
        with preamp.scale_loss(loss, self.optimizer, **options) as scaled:
            scaled.backward()


Program = Callable[[Run, int], object]


def _several_losses(run: Run, step: int) -> None:
    run.engine.scaler(1).set_scale(2.0 ** (4 + step))
    run.backward(loss_id=0)
    run.backward(2.0, loss_id=1)


def _delayed(run: Run, step: int) -> None:
    run.backward(delay_unscale=True)
    run.backward()


def _clipped(run: Run, step: int) -> None:
    run.backward()
    preamp.clip_grad_norm_(run.optimizer, 0.25)


def _groups_added_later(run: Run, step: int) -> None:
    if step == 1:
        run.optimizer.add_param_group({"params": list(run.model.last.parameters()), "lr": 0.5})
    run.backward()


def _plain(run: Run, step: int) -> None:
    run.backward()


BUILDS: dict[str, Any] = {
    "adam": lambda p: optimizers.FusedAdam(p, lr=0.1),
    "adagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.1),
    "lamb": lambda p: optimizers.FusedLAMB(p, lr=0.1),
    "mixed lamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.1),
    "lars": lambda p: optimizers.FusedLARS(p, lr=0.1, momentum=0.9, trust_coefficient=0.5),
    "novograd": lambda p: optimizers.FusedNovoGrad(p, lr=0.1),
    "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.1)),
    "fused adam of torch": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "foreach adam of torch": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
}
ROWS: dict[str, dict[str, Any]] = {
    "several losses with scales of their own": {"program": _several_losses, "num_losses": 2},
    # Summed scaled: at O5 in bfloat16, where torch's DDP adds up before it averages.
    "delayed unscaling": {"program": _delayed, "tolerance": 2.0**-8},
    "clipping": {"program": _clipped, "tolerance": LAST_BIT},
    "frozen parameters": {"freezes": True},
    "recomputed layers": {"recomputes": True},
    "groups added later": {"program": _groups_added_later, "first_only": True},
    "groups added later to a fused one": {
        "program": _groups_added_later,
        "first_only": True,
        "build": lambda params: optimizers.FusedSGD(params, lr=0.25),
    },
    **{name: {"build": build, "tolerance": LAST_BIT} for name, build in BUILDS.items()},
}


def check_programs_are_those_under_ddp() -> None:
    for name, row in ROWS.items():
        row = {"program": _plain, "build": sgd, "tolerance": 0.0, "first_only": False} | row
        net = {key: row.pop(key) for key in ("freezes", "recomputes") if key in row}
        program, build, tolerance = row.pop("program"), row.pop("build"), row.pop("tolerance")
        for level in each(LEVELS):
            found: list[list[torch.Tensor]] = []
            for is_sharded in (True, False):
                run = Run(level, build, is_sharded, Net(**net), **row)
                for step in range(STEPS):
                    program(run, step)
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                assert run.engine.steps_skipped == 0
                found.append(list(map(whole, run.model.state_dict().values())))
                run.engine.close()
            for own, wanted in zip(*found, strict=True):
                where = f"{name}, {level}"
                torch.testing.assert_close(own, wanted, rtol=0, atol=tolerance, msg=where)


# -- torch.distributed.checkpoint -----------------------------------------------------------------

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "whole, from the first rank": {"full_state_dict": True, "cpu_offload": True},
}


def _start(level: str, storage: str, kind: Any, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 5))
    fully_shard(model[0])
    fully_shard(model)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]
    more: Any = {"storage": storage, "verbosity": 0, "backend": "reference"}
    return preamp.initialize(model, kind(groups, lr=0.01), opt_level=level, **more)


def _train(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        loss = model(torch.randn(4, 7, generator=generator)).square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()


def _go_on_alike(where: str, *runs: tuple[Any, Any]) -> None:
    found = []
    for model, optimizer in runs:
        _train(model, optimizer, range(2, 4))
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        values = [*model.state_dict().values(), *model.parameters(), *state]
        found.append([whole(value) for value in values if isinstance(value, torch.Tensor)])
    for ours, wanted in zip(*found, strict=True):
        assert_same(ours, wanted, where)


def check_state_dicts_resume_bitwise() -> None:
    for level, storage, kind, name, is_new in each(
        ("O2", "O5"), ("full", "compact"), (FusedAdam, optim.AdamW), OPTIONS, (True, False), size=2
    ):
        storage = storage if kind is FusedAdam else "full"
        model, optimizer = _start(level, storage, kind, 0)
        _train(model, optimizer, range(2))
        told = dict(OPTIONS[name])
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**told))
        if "full_state_dict" in told and (dist.get_rank() == 0 or "cpu_offload" not in told):
            assert weights["0.weight"].dtype is torch.float32
            assert weights["0.weight"].shape == (9, 7)
        weights, state = copy.deepcopy(weights), copy.deepcopy(state)
        other, others = _start(level, storage, kind, 1)
        if not is_new:
            _train(other, others, range(5, 6))
        if told.pop("cpu_offload", False):  # other ranks have nothing
            told["broadcast_from_rank0"] = True
        options = StateDictOptions(**told)
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, others, state, options=options)
        preamp.engine_of(other).load_state_dict(preamp.engine_of(model).state_dict())
        where = f"{level}, {storage}, {kind}, {name}"
        _go_on_alike(where, (model, optimizer), (other, others))


def check_files_of_torch_resume_bitwise() -> None:
    """``dcp.save``, and ``dcp.load`` into what ``get_state_dict`` has returned."""
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    runs = [_start("O5", "split", FusedAdam, seed) for seed in range(2)]
    _train(*runs[0], range(2))
    names = "model_state_dict", "optim_state_dict"
    folder = str(Path(folders[0]) / "step")
    dcp.save(dict(zip(names, get_state_dict(*runs[0]), strict=True)), checkpoint_id=folder)
    found = dict(zip(names, get_state_dict(*runs[1]), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(*runs[1], **found)
    _go_on_alike("files", *runs)
