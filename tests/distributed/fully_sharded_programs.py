# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of programs around models under ``fully_shard``: legal ones and refused."""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

import preamp
from cases.levels import LEVEL_NAMES
from distributed.fully_sharded_checks import RANKS, Run, batch, make, same, sgd, shard
from kit.refusals import refused
from preamp.core.tensors import local_of


def check_accumulation() -> None:
    """With a reduction for every backward, and with one for all of them."""
    for level in LEVEL_NAMES:
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
    with (
        refused("distributed", "unreduced gradients of another scale"),
        preamp.scale_loss(run.loss(), run.optimizer, loss_id=1),
    ):
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
        with refused("distributed", "another dtype for gathering", level=level):
            Run(level, sgd, mp_policy=policy)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model)
    before = [local_of(p).clone() for p in model.parameters()]
    with refused("distributed", "a batch norm in a shard"):
        preamp.initialize(model, sgd(model.parameters()), opt_level="O2", verbosity=0)
    assert same([local_of(p) for p in model.parameters()], before)
    model(torch.ones(2, 4)).sum().backward()

    model = make()
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    shard(model)
    with refused("distributed", "fully_shard after initialize", changes=True):
        model(batch(0))
    preamp.engine_of(optimizer).close()


def check_ranks_that_differ() -> None:
    """Told before anything is gathered, also after an evaluation has left weights gathered."""
    cases = {
        "sharded levels": Differing(levels=("O2", "O5")),
        "sharded scales": Differing(scales=(8.0, 16.0)),
        "sharded widths": Differing(widths=(1, 4)),
        "sharded optimizers": Differing(optimizers=("SGD", "Adam")),
        "sharded parts": Differing(parts=(1, 2)),
    }
    for name, case in cases.items():
        with refused("distributed", name, changes=True):
            case.first_forward()
    Differing().first_forward()
    Differing().first_forward(evaluates_first=True)


def check_engines_that_load_different_states() -> None:
    """After the first step the next forward compares again; each rank would unscale by its own."""
    run = Run("O2", sgd, loss_scale="dynamic")
    run.engine.scaler(0).set_scale(16.0)
    run.step()
    state, before = run.engine.state_dict(), run.weights()
    other = {"loss_scale": 4.0 * (1 + dist.get_rank()), "unskipped": 0}
    preamp.load_state_dict(run.engine, {"loss_scaler0": other})
    with refused("distributed", "sharded scales loaded later", changes=True):
        run.step()
    assert same(run.weights(), before)
    preamp.load_state_dict(run.engine, state)
    run.step()
    run.engine.close()


@dataclass
class Differing:
    """What each of two ranks trains."""

    levels: tuple[str, str] = ("O2", "O2")
    scales: tuple[float, float] = (8.0, 8.0)
    widths: tuple[int, int] = (1, 1)
    optimizers: tuple[str, str] = ("SGD", "SGD")
    parts: tuple[int, int] = (2, 2)

    def first_forward(self, *, evaluates_first: bool = False) -> None:
        rank = dist.get_rank()
        model = nn.Sequential(
            nn.Linear(4, 5, bias=False), nn.Linear(5, self.widths[rank], bias=False)
        )
        for part in [*model.children()][: self.parts[rank]]:
            fully_shard(part)
        fully_shard(model)
        optimizer = getattr(torch.optim, self.optimizers[rank])(model.parameters(), lr=0.1)
        preamp.initialize(
            model, optimizer, opt_level=self.levels[rank], loss_scale=self.scales[rank], verbosity=0
        )
        try:
            if evaluates_first:
                with torch.no_grad():
                    model(batch(rank))
            model(batch(rank)).sum().backward()
        finally:
            preamp.engine_of(model).close()


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
