# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of models under ``fully_shard``."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from cases.selection import combinations
from preamp.core.tensors import local_of
from preamp.optimizers import FusedAdam

RANKS = 2
ROWS = 8

Optimize = Callable[[Any], torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def make(*, bias: bool = False) -> nn.Sequential:
    """Weights of few bits, so that sums do not depend on their order; one has an empty shard."""
    model = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Linear(5, 1, bias=bias))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
    return model


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for part in model.children():
        fully_shard(part, **options)
    fully_shard(model, **options)
    return model


def batch(rank: int | None) -> torch.Tensor:
    rows = torch.randint(-1, 2, (ROWS, 4), generator=torch.Generator().manual_seed(1)).float()
    return rows if rank is None else rows[rank * ROWS // RANKS :][: ROWS // RANKS]


class Run:
    """A model in training, sharded or not."""

    def __init__(
        self, level: str, optimize: Optimize, *, is_sharded: bool = True, **options: Any
    ) -> None:
        policy = options.pop("mp_policy", None)
        self.rank = dist.get_rank() if is_sharded else None
        self.model = make()
        if is_sharded:
            shard(self.model, **({} if policy is None else {"mp_policy": policy}))
        self.optimizer = optimize(self.model.parameters())
        options = {"loss_scale": 8.0} | options
        preamp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)
        self.engine = preamp.engine_of(self.model)

    def loss(self) -> torch.Tensor:
        return self.model(batch(self.rank)).float().mean()

    def backward(self, damage: Callable[[], None] | None = None) -> None:
        with preamp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
            if damage is not None:
                damage()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [whole(value) for value in self.model.state_dict().values()]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def assert_rounded(run: Run) -> None:
    """Each half weight is its rounded master, in every bit of this rank's part."""
    twins = [twin for session in run.engine.sessions.values() for twin in session.masters or ()]
    assert len(twins) == 2
    for twin in twins:
        assert isinstance(twin.master, DTensor)
        assert isinstance(twin.master, nn.Parameter)
        assert twin.master.dtype is torch.float32
        half, master = local_of(twin.half), local_of(twin.master)
        assert half.dtype is twin.half.dtype
        assert half.dtype is run.engine.policy.half_dtype
        assert torch.equal(half, master.to(half.dtype))


def check_levels_agree_with_one_process() -> None:
    for level, optimize in combinations(LEVEL_NAMES, (sgd, partial(FusedAdam, lr=0.25))):
        sharded, single = (Run(level, optimize, is_sharded=it) for it in (True, False))
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
    run = Run("O2", sgd)
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


class Counted:
    """All-reduces and the bytes each had."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


@contextmanager
def counted() -> Iterator[Counted]:
    found, original = Counted(), dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.sizes.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield found


def check_a_step_costs_one_small_all_reduce() -> None:
    for level in LEVEL_NAMES:
        single = Run(level, sgd, is_sharded=False, loss_scale="dynamic")
        run = Run(level, sgd, loss_scale="dynamic")
        for one in (single, run):
            one.engine.scaler(0).set_scale(16.0)
        for number in range(3):
            with counted() as found:
                run.backward()
                norm = preamp.clip_grad_norm_(run.optimizer, 0.5)
                run.optimizer.step()
                run.optimizer.zero_grad()
            single.backward()
            wanted = preamp.clip_grad_norm_(single.optimizer, 0.5)
            single.optimizer.step()
            single.optimizer.zero_grad()
            torch.testing.assert_close(norm, wanted, rtol=1e-2, atol=0)
            # In the first step nobody knows yet that the script clips.
            assert found.sizes == ([8, 8] if number == 0 else [16]), (level, found.sizes)
        run.engine.close()
        single.engine.close()


def check_an_overflow_in_one_rank_s_part_skips_everywhere() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, sgd, loss_scale="dynamic")
        run.engine.scaler(0).set_scale(16.0)
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
        run.engine.close()


def check_clipping_by_torch_and_reading_gradients() -> None:
    for level in ("O0", "O2", "O5"):
        run, single = Run(level, sgd), Run(level, sgd, is_sharded=False)
        for one in (run, single):
            one.backward()
        grads = [whole(p.grad) for p in preamp.master_params(run.optimizer) if p.grad is not None]
        wanted = [p.grad for p in preamp.master_params(single.optimizer) if p.grad is not None]
        assert same(grads, wanted)
        norms = [
            whole(torch.nn.utils.clip_grad_norm_(preamp.master_params(one.optimizer), 0.5))
            for one in (run, single)
        ]
        torch.testing.assert_close(*norms)
        largest = [preamp.clip_grad_norm_(one.optimizer, 0.25, math.inf) for one in (run, single)]
        torch.testing.assert_close(*largest)
        for one in (run, single):
            one.optimizer.step()
        for found, there in zip(run.weights(), single.weights(), strict=True):
            torch.testing.assert_close(found, there)
        for set_to_none in (False, True):
            run.optimizer.zero_grad(set_to_none=set_to_none)
            grads = [p.grad for p in preamp.master_params(run.optimizer)]
            assert all((grad is None) is set_to_none for grad in grads)
            assert not any(bool(local_of(grad).any()) for grad in grads if grad is not None)
        run.engine.close()
        single.engine.close()
