# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of SyncBatchNorm: its batches together are one batch of a plain one.

The oracle is torch's batch norm in float64 over the whole batch; the error budget is what torch's
batch norm in the input's own dtype makes over the whole batch.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cases.tolerances import assert_within_budget
from distributed.ranks import each
from kit.refusals import refused
from preamp.distributed.sync_batchnorm.module import merged_statistics
from preamp.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

CHANNELS = 3
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPATIAL = ((), (5,), (2, 3), (2, 1, 2))
SPLITS = ((3, 5), (1, 6), (4, 4), (0, 5), (1, 1))


def normal(*shape: int, offset: float = 0.0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64) + offset


def mine(whole: torch.Tensor, split: Sequence[int]) -> torch.Tensor:
    """This rank's part of the whole batch."""
    return whole.split(list(split))[dist.get_rank()].clone()


def summed(local: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, in float64."""
    total = local.double()
    dist.all_reduce(total)
    return total


def layer_for(dtype: torch.dtype, **arguments: Any) -> SyncBatchNorm:
    layer = SyncBatchNorm(CHANNELS, **arguments).to(
        torch.float64 if dtype is torch.float64 else torch.float32
    )
    if layer.weight is not None and layer.bias is not None:
        layer.weight.data.copy_(torch.tensor([0.5, -2.0, 1.0]))
        layer.bias.data.copy_(torch.tensor([0.0, 1.0, -3.0]))
    return layer


def plain_run(
    layer: SyncBatchNorm, x: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Output, gradients and running statistics of torch's batch norm over the whole batch."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    x = x.detach().clone().to(dtype).requires_grad_()
    weight, bias = (
        None if p is None else p.detach().to(wide).requires_grad_()
        for p in (layer.weight, layer.bias)
    )
    mean, var = torch.zeros(CHANNELS, dtype=wide), torch.ones(CHANNELS, dtype=wide)
    y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.1, eps=layer.eps)
    y.backward(dy.to(dtype))
    found = {"y": y, "dx": x.grad, "mean": mean, "var": var}
    if weight is not None and bias is not None:
        found |= {"dw": weight.grad, "db": bias.grad}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def check_training_equals_one_batch() -> None:
    for dtype, spatial, split in each(DTYPES, SPATIAL, SPLITS, size=2):
        whole = normal(sum(split), CHANNELS, *spatial, offset=4.0).to(dtype).double()
        dy = normal(*whole.shape).to(dtype).double()
        layer = layer_for(dtype)
        oracle = plain_run(layer, whole, dy, torch.float64)
        low = plain_run(layer, whole, dy, dtype)
        x = mine(whole, split).to(dtype).requires_grad_()
        y = layer(x)
        y.backward(mine(dy, split).to(dtype))
        assert y.dtype is x.grad.dtype is dtype
        assert layer.weight.grad.dtype is layer.weight.dtype
        for name, ours in (("y", y), ("dx", x.grad)):
            budget = (mine(low[name], split), mine(oracle[name], split))
            if ours.numel():
                assert_within_budget(ours.detach(), *budget)
        assert_within_budget(summed(layer.weight.grad), low["dw"], oracle["dw"])
        assert_within_budget(summed(layer.bias.grad), low["db"], oracle["db"])
        assert_within_budget(layer.running_mean, low["mean"], oracle["mean"])
        assert_within_budget(layer.running_var, low["var"], oracle["var"])
        assert layer.num_batches_tracked.item() == 1


def check_channels_last_are_the_same_numbers() -> None:
    for spatial, relu, residual in each(SPATIAL, (False, True), (False, True), size=2):
        x, z, dy = (normal(4, CHANNELS, *spatial) for _ in range(3))
        first, last = (
            layer_for(torch.float64, channel_last=flag, fuse_relu=relu) for flag in (False, True)
        )
        found = []
        for layer, moved in ((first, False), (last, True)):
            own = [mine(t, (1, 3)) for t in (x, z, dy)]
            own = [t.movedim(1, -1).contiguous() if moved else t for t in own]
            leaf, extra = own[0].requires_grad_(), own[1].requires_grad_()
            y = layer.forward(leaf, extra if residual else None)
            y.backward(own[2])
            grads = [leaf.grad, extra.grad if residual else torch.zeros(1, 1)]
            found.append([t.movedim(-1, 1) if moved else t for t in (y, *grads)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        y, _, dz = found[0]
        if relu:
            assert (y >= 0).all()
            assert not residual or torch.equal(dz, mine(dy, (1, 3)) * (y > 0))


def check_options_of_a_plain_batch_norm() -> None:
    options = [
        {"momentum": None},
        {"momentum": 0.3},
        {"affine": False},
        {"eps": 0.1},
        {"track_running_stats": False},
    ]
    for arguments in options:
        plain = nn.BatchNorm1d(CHANNELS, **arguments).double()
        layer = SyncBatchNorm(CHANNELS, **arguments).double()
        for split in ((3, 5), (2, 2), (4, 1)):
            whole = normal(sum(split), CHANNELS, 2)
            torch.testing.assert_close(layer(mine(whole, split)), mine(plain(whole), split))
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(layer.state_dict()[name], value)
        own = normal(4, CHANNELS, 2)
        torch.testing.assert_close(layer.eval()(own), plain.eval()(own))


def check_running_statistics_can_be_frozen() -> None:
    layer = layer_for(torch.float64)
    layer.track_running_stats = False
    before = copy.deepcopy(layer.state_dict())
    layer(normal(4, CHANNELS))
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())


def check_evaluation_talks_to_nobody() -> None:
    layer = layer_for(torch.float64).eval()
    if dist.get_rank() == 0:  # would wait for the other one
        layer(normal(4, CHANNELS))
        SyncBatchNorm(CHANNELS, track_running_stats=False).eval()(torch.randn(4, CHANNELS))


def check_only_what_needs_gradients_gets_them() -> None:
    for wants in itertools.product((False, True), repeat=3):
        layer = layer_for(torch.float64)
        x = normal(3, CHANNELS).requires_grad_(wants[0])
        layer.weight.requires_grad_(wants[1])
        layer.bias.requires_grad_(wants[2])
        y = layer(x)
        assert y.requires_grad is any(wants)
        if any(wants):
            y.sum().backward()
        grads = (x.grad, layer.weight.grad, layer.bias.grad)
        assert tuple(grad is not None for grad in grads) == wants


def check_statistics_do_not_cancel() -> None:
    whole = normal(8, CHANNELS, 4, offset=1e4).float().double()
    found = merged_statistics(mine(whole, (3, 5)).float(), None).var.double()
    # Float32 means of 1e4 are known to 5e-4; a difference of sums of squares is off by ten.
    torch.testing.assert_close(found, whole.var((0, 2), correction=0), rtol=1e-3, atol=0)


def check_one_value_on_a_group_of_one_is_not() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with refused("distributed", "one value in a group of one"):
        SyncBatchNorm(CHANNELS, process_group=alone)(torch.ones(1, CHANNELS))


# -- pairs of four ranks, which share statistics with each other -----------------------------------


def four_groups_keep_to_themselves() -> None:
    group = create_syncbn_process_group(2)
    pair = dist.get_rank() // 2
    assert dist.get_process_group_ranks(group) == [2 * pair, 2 * pair + 1]
    x = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(pair))
    own = x.chunk(2)[dist.get_rank() % 2].clone().requires_grad_()
    plain = nn.BatchNorm1d(3).double()
    layer = convert_syncbn_model(nn.BatchNorm1d(3).double(), group)
    wanted, y = plain(x.requires_grad_()), layer(own)
    wanted.pow(3).sum().backward()
    y.pow(3).sum().backward()
    torch.testing.assert_close(y, wanted.chunk(2)[dist.get_rank() % 2])
    torch.testing.assert_close(own.grad, x.grad.chunk(2)[dist.get_rank() % 2])
    torch.testing.assert_close(layer.running_var, plain.running_var)


def four_set_the_group_later() -> None:
    layer = SyncBatchNorm(3)
    layer._specify_process_group(create_syncbn_process_group(1))
    layer._specify_channel_last(True)
    normed = layer(torch.randn(2, 4, 3) * (dist.get_rank() + 1))
    torch.testing.assert_close(normed.mean((0, 1)), torch.zeros(3), atol=1e-5, rtol=0)


def four_round_half_gradients_once() -> None:
    # In float16 2048 + 1 is 2048, so three ones after a 2048 are lost one by one.
    layer = nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(layer, allreduce_always_fp32=True, gradient_average=False)
    mine = 2048.0 if dist.get_rank() == 0 else 1.0
    ddp(torch.full((1, 1), mine, dtype=torch.float16)).backward()
    assert layer.weight.grad.item() == torch.tensor(2051.0).half().item()
