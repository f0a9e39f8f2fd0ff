# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of models under ``fully_shard``: they are those of one process or of DDP.

Weights have few bits, so that sums do not depend on their order; with norms, and where a part ends
within a vector of the processor, they are equal up to the last bit. What
``torch.distributed.checkpoint`` reads and writes goes on bitwise. What begins with ``full_`` or
``records_`` is of the full suite.
"""

import copy
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import kit.run
import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from cases.tolerances import assert_same
from distributed.ranks import Training, each, shard, whole
from kit.compare import same
from kit.refusals import refused
from preamp import optimizers
from preamp.core.tensors import local_of
from preamp.numerics import NumericsRecord, measure
from preamp.optimizers import FusedAdam

RANKS = 2
ROWS = 8

Optimize = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
    return model


def make() -> nn.Sequential:
    """One of its weights has an empty shard."""
    return filled(nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1, bias=False)))


def batch(rank: int | None) -> torch.Tensor:
    rows = torch.randint(-1, 2, (ROWS, 4), generator=torch.Generator().manual_seed(1)).float()
    return rows if rank is None else rows[rank * ROWS // RANKS :][: ROWS // RANKS]


class Run(kit.run.Run):
    """A model in training, sharded, or with all rows in one process, or ``beside`` one under DDP.

    ``scale`` is where a dynamic scale begins, ``first_only`` leaves the optimizer the first layer.
    """

    def __init__(
        self,
        level: str,
        optimize: Optimize = sgd,
        *,
        is_sharded: bool = True,
        scale: float | None = None,
        model: Any = None,
        beside: bool = False,
        first_only: bool = False,
        **options: Any,
    ) -> None:
        self.rank = dist.get_rank() if is_sharded or beside else None
        made = make() if model is None else model
        policy = options.pop("mp_policy", None)
        if is_sharded:
            shard(made, **({} if policy is None else {"mp_policy": policy}))
        options = {"loss_scale": 8.0 if scale is None else "dynamic"} | options
        super().__init__(level, model=lambda: made, starts=False, **options)
        self.optimizer = optimize((made.first if first_only else made).parameters())
        self.optimizers = [self.optimizer]
        self.initialize()
        for scaler in self.engine.scalers if scale is not None else ():
            scaler.set_scale(scale)
        ddp = DistributedDataParallel
        self.forward = ddp(made, find_unused_parameters=True) if beside else made

    def loss(self, index: int = 0) -> torch.Tensor:
        del index
        return self.forward(batch(self.rank)).float().mean()

    def weights(self) -> list[torch.Tensor]:
        return list(map(whole, self.model.state_dict().values()))


def pair(level: str, optimize: Optimize = sgd, **options: Any) -> tuple[Run, Run]:
    """Sharded, and not."""
    sharded, single = (Run(level, optimize, is_sharded=it, **options) for it in (True, False))
    return sharded, single


def assert_rounded(run: Run) -> None:
    """Each half weight is its rounded master, in every bit of this rank's part."""
    twins = [twin for session in run.engine.sessions.values() for twin in session.table.twins]
    assert len(twins) == 2
    for twin in twins:
        assert isinstance(twin.master, DTensor)
        assert isinstance(twin.master, nn.Parameter)
        assert twin.master.dtype is torch.float32
        half, master = local_of(twin.half), local_of(twin.master)
        assert half.dtype is twin.half.dtype is run.engine.policy.half_dtype
        assert torch.equal(half, master.to(half.dtype))


def check_levels_agree_with_one_process() -> None:
    for level, optimize in each(LEVEL_NAMES, (sgd, partial(FusedAdam, lr=0.25))):
        sharded, single = pair(level, optimize)
        assert same(sharded.weights(), list(map(whole, make().state_dict().values())))
        for run in (sharded, single):
            run.iterate()
        assert same(sharded.weights(), single.weights()), level
        state = sharded.model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert {value.dtype for value in state.values()} == {torch.float32}
        if level in WITH_MASTERS:
            assert_rounded(sharded)
        for run in (sharded, single):
            run.engine.close()
        assert same([whole(p) for p in sharded.model.parameters()], single.weights())
        # The model trains on in float32: what fully_shard keeps of dtypes was renewed.
        sharded.model(batch(0)).sum().backward()
        grads = [p.grad for p in sharded.model.parameters() if p.grad is not None]
        assert {grad.dtype for grad in grads} == {torch.float32}


def check_a_step_costs_one_small_all_reduce() -> None:
    sizes: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **more)

    split: dict[str, Any] = {"optimize": partial(FusedAdam, lr=0.25), "storage": "split"}
    for level in each((*LEVEL_NAMES, "split")):
        more = split if level == "split" else {}
        runs = pair("O5" if more else level, scale=16.0, **more)
        for number in range(3):
            norms = []
            for run in runs:
                sizes.clear()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(dist, "all_reduce", all_reduce)
                    if number:  # ranks are compared in the first forward, and not again
                        patch.delattr(dist, "all_gather")
                    run.backward()
                    norms.append(preamp.clip_grad_norm_(run.optimizer, 0.5))
                    run.play("step; zero")
                # In the first step nobody knows yet that the script clips.
                wanted = [8, 8] if number == 0 else [16]
                assert sizes == (wanted if run is runs[0] else []), (level, sizes)
            torch.testing.assert_close(*norms, rtol=1e-2, atol=0)


def check_an_overflow_in_one_rank_s_part_skips_everywhere() -> None:
    for level in each(LEVEL_NAMES):
        run = Run(level, scale=16.0)
        run.iterate()
        before = run.weights()
        with preamp.scale_loss(run.loss(), run.optimizer) as scaled:
            scaled.backward()
            if run.rank == 1:
                local_of(run.model[0].weight.grad)[0, 0] = math.nan
        run.optimizer.step()
        assert run.engine.last_step_skipped
        assert run.engine.loss_scale() == 8.0
        assert same(run.weights(), before)
        (cause,) = run.engine.overflow_causes
        assert cause.was_elsewhere is (dist.get_rank() == 0)
        assert cause.parameters == (("0.weight",) if dist.get_rank() == 1 else ())
        assert ("another rank" in cause.named()) is cause.was_elsewhere
        run.optimizer.zero_grad()
        run.iterate()
        assert not run.engine.last_step_skipped


def check_clipping_by_torch_and_reading_gradients() -> None:
    for level in each(("O0", "O2", "O5")):
        runs = run, _ = pair(level)
        grads, norms, largest = [], [], []
        for one in runs:
            one.backward()
            params = list(preamp.master_params(one.optimizer))
            grads.append([whole(p.grad) for p in params if p.grad is not None])
            norms.append(whole(nn.utils.clip_grad_norm_(params, 0.5)))
            largest.append(preamp.clip_grad_norm_(one.optimizer, 0.25, math.inf))
            one.optimizer.step()
        assert same(*grads)
        torch.testing.assert_close(*norms)
        torch.testing.assert_close(*largest)
        torch.testing.assert_close(*[one.weights() for one in runs])
        for set_to_none in (False, True):
            run.optimizer.zero_grad(set_to_none=set_to_none)
            left = [p.grad for p in preamp.master_params(run.optimizer)]
            assert all((grad is None) is set_to_none for grad in left)
            assert not any(bool(local_of(grad).any()) for grad in left if grad is not None)


def check_accumulation() -> None:
    """With a reduction for every backward, and with one for all of them."""
    for level in each(LEVEL_NAMES):
        results: list[list[torch.Tensor]] = []
        for syncs in (True, False, None):
            run = Run(level, is_sharded=syncs is not None, scale=8.0)
            run.engine.scaler(0).growth_tracker.fill_(1998)  # a growth is near
            for is_last in (False, True):
                if syncs is not None:
                    run.model.set_requires_gradient_sync(syncs or is_last)
                run.backward()
            run.optimizer.step()
            results.append(run.weights())
            run.engine.close()
        assert same(results[0], results[2]), level
        assert same(results[1], results[2]), level


def check_unreduced_gradients_keep_their_scale() -> None:
    run = Run("O2", num_losses=2)
    run.engine.scaler(1).set_scale(4.0)
    run.model.set_requires_gradient_sync(False)
    run.backward()
    with (
        refused("distributed", "unreduced gradients of another scale"),
        preamp.scale_loss(run.loss(), run.optimizer, loss_id=1),
    ):
        pass
    run.model.set_requires_gradient_sync(True)
    run.iterate()


def check_gathering_in_half_by_torch() -> None:
    """float32 parameters, gathered in half by torch, scaled by preamp; or the level's own half."""
    for dtype in each((torch.float16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        single = Run("O0", is_sharded=False)
        single.iterate()
        for level, scale in (("O0", 16.0), ("O2" if dtype is torch.float16 else "O5", None)):
            run = Run(level, mp_policy=policy, scale=scale)
            run.iterate()
            assert same(run.weights(), single.weights())
            run.engine.close()


def check_refusals() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for level in ("O1", "O2", "O3"):
        with refused("distributed", "another dtype for gathering", level=level):
            Run(level, mp_policy=policy)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model)
    before = [local_of(p).clone() for p in model.parameters()]
    with refused("distributed", "a batch norm in a shard"):
        preamp.initialize(model, sgd(model.parameters()), opt_level="O2", verbosity=0)
    assert same([local_of(p) for p in model.parameters()], before)
    model(torch.ones(2, 4)).sum().backward()
    run = Run("O2", is_sharded=False)
    shard(run.model)
    with refused("distributed", "fully_shard after initialize", changes=True):
        run.model(batch(0))


def check_engines_that_load_different_states() -> None:
    """After the first step the next forward compares again; each rank would unscale by its own."""
    run = Run("O2", scale=16.0)
    run.iterate()
    state, before = run.engine.state_dict(), run.weights()
    other = {"loss_scale": 4.0 * (1 + dist.get_rank()), "unskipped": 0}
    run.engine.load_state_dict({"loss_scaler0": other})
    with refused("distributed", "sharded scales loaded later", changes=True):
        run.iterate()
    assert same(run.weights(), before)
    run.engine.load_state_dict(state)
    run.iterate()


def check_batch_norms_by_themselves() -> None:
    run = Run("O2", model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    assert run.model.get_parameter("1.weight").dtype is torch.float32
    run.iterate()


def check_copies_and_odd_meshes() -> None:
    """A replicated parameter counts once; a copy of a master is a plain sharded parameter."""
    run = Run("O2")
    (master, _) = preamp.master_params(run.optimizer)
    copied = copy.deepcopy(master)
    assert isinstance(copied, DTensor)
    assert type(copied) is not type(master)
    run.engine.close()
    mesh = init_device_mesh("cpu", (RANKS,))
    model = nn.Linear(3, 4)
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach().fill_(1.0), mesh)))
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
    for param in model.parameters():
        param.grad = torch.ones_like(param) * 2
    assert float(preamp.clip_grad_norm_(optimizer, 1.0)) == 8.0


# -- programs, each as under DDP -------------------------------------------------------------------


STEPS = 3
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
        filled(self).first.requires_grad_(not freezes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recomputes:
            x = cast("Any", checkpoint)(self.middle, x, use_reentrant=False)
        else:
            x = self.middle(x)
        return self.last(x)


def _several_losses(run: Run, step: int) -> None:
    run.engine.scaler(1).set_scale(2.0 ** (4 + step))
    run.backward(loss_id=0)
    run.back(run.loss(), 2.0, loss_id=1)


def _groups_added_later(run: Run, step: int) -> None:
    if step == 1:
        run.optimizer.add_param_group({"params": list(run.model.last.parameters()), "lr": 0.5})
    run.backward()


PROGRAMS: dict[str, dict[str, Any]] = {
    "several losses with scales of their own": {"program": _several_losses, "num_losses": 2},
    "frozen parameters": {"freezes": True},
    "recomputed layers": {"recomputes": True},
    "groups added later": {"program": _groups_added_later, "first_only": True},
    "adam": {"build": partial(optimizers.FusedAdam, lr=0.1), "tolerance": LAST_BIT},
}


def full_programs_are_those_under_ddp() -> None:
    for name, row in PROGRAMS.items():
        row = {"program": "backward", "build": sgd, "tolerance": 0.0} | row
        net = {key: row.pop(key) for key in ("freezes", "recomputes") if key in row}
        program, build, tolerance = row.pop("program"), row.pop("build"), row.pop("tolerance")
        for level in each(("O1", "O2", "O5")):
            found: list[list[torch.Tensor]] = []
            for way in ({}, {"is_sharded": False, "beside": True}):
                run = Run(level, build, model=Net(**net), scale=2.0**10, **row, **way)
                for step in range(STEPS):
                    run.play(program) if isinstance(program, str) else program(run, step)
                    run.play("step; zero")
                assert run.engine.steps_skipped == 0
                found.append(list(map(whole, run.model.state_dict().values())))
                run.engine.close()
            for own, wanted in zip(*found, strict=True):
                where = f"{name}, {level}"
                torch.testing.assert_close(own, wanted, rtol=0, atol=tolerance, msg=where)


# -- torch.distributed.checkpoint ----------------------------------------------------------------

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "whole, from the first rank": {"full_state_dict": True, "cpu_offload": True},
}


def full_state_dicts_resume_bitwise() -> None:
    for level, storage, kind, name, is_new in each(
        ("O2", "O5"), ("full", "compact"), ("FusedAdam", "AdamW"), OPTIONS, (True, False), size=2
    ):
        storage = storage if kind == "FusedAdam" else "full"
        one, other = (Training(level, storage, kind, "fully_shard", seed) for seed in (0, 1))
        one.train(2)
        told = dict(OPTIONS[name])
        states = get_state_dict(one.model, one.optimizer, options=StateDictOptions(**told))
        weights, state = copy.deepcopy(states)
        if "full_state_dict" in told and (dist.get_rank() == 0 or "cpu_offload" not in told):
            assert weights["0.weight"].dtype is torch.float32
            assert weights["0.weight"].shape == (16, 8)
        if not is_new:
            other.train(1)
        if told.pop("cpu_offload", False):  # other ranks have nothing
            told["broadcast_from_rank0"] = True
        options = StateDictOptions(**told)
        set_model_state_dict(other.model, weights, options=options)
        set_optimizer_state_dict(other.model, other.optimizer, state, options=options)
        for of in ("engine", "scheduler"):
            getattr(other, of).load_state_dict(getattr(one, of).state_dict())
        for run in (one, other):
            torch.manual_seed(dist.get_rank())
            random.seed(0)
            run.train(2)
        for ours, wanted in zip(one.numbers(), other.numbers(), strict=True):
            assert_same(ours, wanted, f"{level}, {storage}, {kind}, {name}")


# -- records of this rank's part -------------------------------------------------------------------


EVEN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
}


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def records_statistics_are_of_this_rank_s_part() -> None:
    for level, kind in each(("O0", "O1", "O2", "O5"), ("light", "full"), size=2):
        run = Run(level, scale=8.0, numerics=kind, numerics_every=1)
        run.backward()
        named = dict(run.model.named_parameters())
        scale = 8.0 if level in WITH_MASTERS else 1.0  # what is still on the gradients
        grads = {name: local_of(param.grad) / scale for name, param in named.items()}
        run.optimizer.step()
        (record,) = [r for r in run.engine.history if isinstance(r, NumericsRecord)]
        found = {(t.what, t.name): t for t in record.tensors}
        for name, grad in grads.items():
            told = found["gradient", name]
            assert told.elements == grad.numel()
            assert told.zeros == int(measure([grad])[0].tally.counts[0])
            assert told.max_abs / told.scale == largest(grad)
        assert any(not grad.numel() for grad in grads.values()) is (dist.get_rank() == 1)
        assert (("weight", "0.weight") in found) is (kind == "full")
        for name, param in named.items() if kind == "full" else ():
            told, weight = found["weight", name], local_of(param)
            assert told.elements == weight.numel()
            assert told.max_abs == largest(weight)
            if level in WITH_MASTERS:
                assert told.stalled is not None
                assert told.stalled <= weight.numel()


def records_memory_is_this_rank_s() -> None:
    """As estimated where parts are even; what a forward has gathered is no master."""
    for level, name in each(LEVEL_NAMES, EVEN, size=2):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        shares: Any = {"world_size": dist.get_world_size(), "sharding": "fsdp"}
        planned = EVEN[name](model.parameters())
        wanted = preamp.estimate(model, level, planned, **shares).categories
        run = Run(level, EVEN[name], model=model).play("iterate; backward")
        assert preamp.count_memory(run.engine) == wanted, (level, name)
        run.play("step; zero; forward")
        assert preamp.count_memory(run.engine)["masters"] == wanted["masters"]
