# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of models under ``fully_shard``: they are those of one process.

Weights have few bits, so that sums do not depend on their order.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from distributed.ranks import each, shard, whole
from kit.refusals import refused
from preamp.core.tensors import local_of
from preamp.optimizers import FusedAdam

RANKS = 2
ROWS = 8

Optimize = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def make() -> nn.Sequential:
    """One of its weights has an empty shard."""
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 1, bias=False))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
    return model


def batch(rank: int | None) -> torch.Tensor:
    rows = torch.randint(-1, 2, (ROWS, 4), generator=torch.Generator().manual_seed(1)).float()
    return rows if rank is None else rows[rank * ROWS // RANKS :][: ROWS // RANKS]


class Run:
    """A model in training, sharded or not; ``scale`` is where a dynamic scale begins."""

    def __init__(
        self,
        level: str,
        optimize: Optimize = sgd,
        *,
        is_sharded: bool = True,
        scale: float | None = None,
        mp_policy: Any = None,
        **options: Any,
    ) -> None:
        self.rank = dist.get_rank() if is_sharded else None
        self.model = make()
        if is_sharded:
            shard(self.model, **({} if mp_policy is None else {"mp_policy": mp_policy}))
        self.optimizer = optimize(self.model.parameters())
        options = {"loss_scale": 8.0 if scale is None else "dynamic", "verbosity": 0} | options
        preamp.initialize(self.model, self.optimizer, opt_level=level, **options)
        self.engine = preamp.engine_of(self.model)
        if scale is not None:
            self.engine.scaler(0).set_scale(scale)

    def loss(self) -> torch.Tensor:
        return self.model(batch(self.rank)).float().mean()

    def backward(self, damage: Callable[[], None] | None = None) -> None:
        with preamp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
            if damage is not None:
                damage()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.end()

    def weights(self) -> list[torch.Tensor]:
        return list(map(whole, self.model.state_dict().values()))


def pair(level: str, optimize: Optimize = sgd, **options: Any) -> tuple[Run, Run]:
    """Sharded, and not."""
    sharded, single = (Run(level, optimize, is_sharded=it, **options) for it in (True, False))
    return sharded, single


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


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
            run.step()
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


def check_a_trained_model_changes_levels() -> None:
    run = Run("O2")
    run.step()
    before = run.weights()
    run.engine.close()
    preamp.initialize(run.model, run.optimizer, opt_level="O5", verbosity=0)
    run.engine = preamp.engine_of(run.model)
    assert same(run.weights(), before)
    assert_rounded(run)
    run.model.load_state_dict({k: v * 1.001 for k, v in run.model.state_dict().items()})
    assert same(run.weights(), [value * 1.001 for value in before])
    run.step()
    assert_rounded(run)


def check_a_step_costs_one_small_all_reduce() -> None:
    sizes: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **more)

    for level in each(LEVEL_NAMES):
        runs = pair(level, scale=16.0)
        for number in range(3):
            norms = []
            for run in runs:
                sizes.clear()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(dist, "all_reduce", all_reduce)
                    run.backward()
                    norms.append(preamp.clip_grad_norm_(run.optimizer, 0.5))
                    run.end()
                # In the first step nobody knows yet that the script clips.
                wanted = [8, 8] if number == 0 else [16]
                assert sizes == (wanted if run is runs[0] else []), (level, sizes)
            torch.testing.assert_close(*norms, rtol=1e-2, atol=0)


def check_an_overflow_in_one_rank_s_part_skips_everywhere() -> None:
    for level in each(LEVEL_NAMES):
        run = Run(level, scale=16.0)
        run.step()
        before = run.weights()

        def damage(run: Run = run) -> None:
            if dist.get_rank() == 1:
                local_of(run.model[0].weight.grad)[0, 0] = math.nan

        run.backward(damage)
        run.optimizer.step()
        assert run.engine.last_step_skipped
        assert run.engine.loss_scale() == 8.0
        assert same(run.weights(), before)
        (cause,) = run.engine.overflow_causes
        assert cause.was_elsewhere is (dist.get_rank() == 0)
        assert cause.parameters == (("0.weight",) if dist.get_rank() == 1 else ())
        assert ("another rank" in cause.named()) is cause.was_elsewhere
        run.optimizer.zero_grad()
        run.step()
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
    run.step()


def check_closures() -> None:
    runs = pair("O5")
    for one in runs:

        def closure(one: Run = one) -> torch.Tensor:
            one.optimizer.zero_grad()
            one.backward()
            return one.loss()

        one.optimizer.step(closure)
    assert same(*[one.weights() for one in runs])


def check_gathering_in_half_by_torch() -> None:
    """float32 parameters, gathered in half by torch, scaled by preamp; or the level's own half."""
    for dtype in each((torch.float16, torch.bfloat16)):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        single = Run("O0", is_sharded=False)
        single.step()
        for level, scale in (("O0", 16.0), ("O2" if dtype is torch.float16 else "O5", None)):
            run = Run(level, mp_policy=policy, scale=scale)
            run.step()
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
    run.step()
    state, before = run.engine.state_dict(), run.weights()
    other = {"loss_scale": 4.0 * (1 + dist.get_rank()), "unskipped": 0}
    run.engine.load_state_dict({"loss_scaler0": other})
    with refused("distributed", "sharded scales loaded later", changes=True):
        run.step()
    assert same(run.weights(), before)
    run.engine.load_state_dict(state)
    run.step()


def check_batch_norms_by_themselves() -> None:
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    assert model.get_parameter("1.weight").dtype is torch.float32
    with preamp.scale_loss(model(batch(dist.get_rank())).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


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
