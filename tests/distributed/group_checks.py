# SPDX-License-Identifier: BSD-3-Clause
"""What four ranks check: pairs of them share statistics, the pairs do not."""

import torch
import torch.distributed as dist

from preamp.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)


def check_groups_keep_to_themselves() -> None:
    group = create_syncbn_process_group(2)
    pair = dist.get_rank() // 2
    assert dist.get_process_group_ranks(group) == [2 * pair, 2 * pair + 1]
    whole = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(pair))
    plain = torch.nn.BatchNorm1d(3).double()
    layer = convert_syncbn_model(torch.nn.BatchNorm1d(3).double(), group)
    x, own = (
        t.requires_grad_() for t in (whole.clone(), whole.chunk(2)[dist.get_rank() % 2].clone())
    )
    wanted, y = plain(x), layer(own)
    wanted.pow(3).sum().backward()
    y.pow(3).sum().backward()
    torch.testing.assert_close(y, wanted.chunk(2)[dist.get_rank() % 2])
    torch.testing.assert_close(own.grad, x.grad.chunk(2)[dist.get_rank() % 2])
    torch.testing.assert_close(layer.running_var, plain.running_var)


def check_the_group_can_be_set_later() -> None:
    layer = SyncBatchNorm(3)
    layer._specify_process_group(create_syncbn_process_group(1))
    layer._specify_channel_last(True)
    x = torch.randn(2, 4, 3) * (dist.get_rank() + 1)
    normed = layer(x)
    torch.testing.assert_close(normed.mean((0, 1)), torch.zeros(3), atol=1e-5, rtol=0)


def check_float32_sums_round_half_gradients_once() -> None:
    # In float16 2048 + 1 is 2048, so three ones after a 2048 are lost one by one.
    mine = 2048.0 if dist.get_rank() == 0 else 1.0
    layer = torch.nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(layer, allreduce_always_fp32=True, gradient_average=False)
    ddp(torch.full((1, 1), mine, dtype=torch.float16)).backward()
    assert layer.weight.grad.item() == torch.tensor(2051.0).half().item()
