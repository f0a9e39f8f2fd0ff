# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of programs around models under ``fully_shard``: legal ones and refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

import preamp
from distributed.fully_sharded_checks import LEVELS, RANKS, Run, batch, make, same, sgd, shard
from preamp.core.tensors import local_of


def check_accumulation() -> None:
    """With a reduction for every backward, and with one for all of them."""
    for level in LEVELS:
        results: list[list[torch.Tensor]] = []
        for syncs in (True, False):
            run = Run(level, sgd, loss_scale="dynamic")
            run.engine.scaler(0).set_scale(8.0)
            run.engine.scaler(0).growth_tracker.fill_(1998)  # a growth is near
            run.model.set_requires_gradient_sync(syncs)
            run.backward()
            run.model.set_requires_gradient_sync(True)
            run.backward()
            run.optimizer.step()
            results.append(run.weights())
            run.engine.close()
        single = Run(level, sgd, is_sharded=False)
        single.backward()
        single.backward()
        single.optimizer.step()
        assert same(results[0], single.weights()), level
        assert same(results[1], single.weights()), level
        single.engine.close()


def check_unreduced_gradients_keep_their_scale() -> None:
    run = Run("O2", sgd, num_losses=2)
    run.engine.scaler(1).set_scale(4.0)
    run.model.set_requires_gradient_sync(False)
    run.backward()
    with pytest.raises(preamp.PreampStateError, match="another loss scale"):
        with preamp.scale_loss(run.loss(), run.optimizer, loss_id=1):
            pass
    run.model.set_requires_gradient_sync(True)
    run.backward()
    run.optimizer.step()
    run.engine.close()


def check_closures() -> None:
    run, single = (Run("O5", sgd, is_sharded=it) for it in (True, False))
    for one in (run, single):

        def closure(one: Run = one) -> torch.Tensor:
            one.optimizer.zero_grad()
            one.backward()
            return one.loss()

        one.optimizer.step(closure)
    assert same(run.weights(), single.weights())
    run.engine.close()
    single.engine.close()


def check_gathering_in_half_by_torch() -> None:
    """float32 parameters, gathered in half by torch, scaled by preamp."""
    for dtype in (torch.float16, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        run = Run("O0", sgd, mp_policy=policy, loss_scale="dynamic")
        run.engine.scaler(0).set_scale(16.0)
        single = Run("O0", sgd, is_sharded=False)
        run.step()
        single.step()
        assert same(run.weights(), single.weights())
        run.engine.close()
        level = "O2" if dtype is torch.float16 else "O5"
        run = Run(level, sgd, mp_policy=policy)  # the same dtype: gradients are summed in float32
        run.step()
        assert same(run.weights(), single.weights())
        run.engine.close()
        single.engine.close()


def check_refusals() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for level in ("O1", "O2", "O3"):
        with pytest.raises(preamp.PreampStateError, match=re.escape("param_dtype=bfloat16")):
            Run(level, sgd, mp_policy=policy)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model)
    before = [local_of(p).clone() for p in model.parameters()]
    with pytest.raises(preamp.PreampStateError, match="on each batch norm by itself"):
        preamp.initialize(model, sgd(model.parameters()), opt_level="O2", verbosity=0)
    assert same([local_of(p) for p in model.parameters()], before)
    model(torch.ones(2, 4)).sum().backward()

    model = make()
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    shard(model)
    with pytest.raises(preamp.PreampStateError, match="fully_shard was called after"):
        model(batch(0))
    preamp.engine_of(optimizer).close()


def check_batch_norms_by_themselves() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    shard(model)
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    assert model[1].weight.dtype is torch.float32
    with preamp.scale_loss(model(batch(dist.get_rank())).float().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    preamp.engine_of(optimizer).close()


def check_copies_pickles_and_odd_meshes() -> None:
    """A replicated parameter counts once; a copy of a master is a plain sharded parameter."""
    mesh = init_device_mesh("cpu", (RANKS,))
    run = Run("O2", sgd)
    (master, _) = preamp.master_params(run.optimizer)
    copied = copy.deepcopy(master)
    assert isinstance(copied, DTensor)
    assert type(copied) is not type(master)
    run.engine.close()
    model = nn.Linear(3, 4)
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach().fill_(1.0), mesh)))
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
    for param in model.parameters():
        param.grad = torch.ones_like(param) * 2
    assert float(preamp.clip_grad_norm_(optimizer, 1.0)) == 8.0
