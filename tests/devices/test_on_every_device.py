# SPDX-License-Identifier: BSD-3-Clause
"""What must hold on each device: always the CPU, and an accelerator if there is one.

Masters, skipped steps and closes there are in `test_programs_on_a_device`, waits in
`test_loops_on_a_device`.
"""

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVELS as LEVEL_CASES

ACCELERATORS = ["cuda"] if torch.cuda.is_available() else []
LEVELS = [case.name for case in LEVEL_CASES]
DEVICES = ["cpu", *ACCELERATORS]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _net(device: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)
    )
    return net.to(device)


def _batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 8, generator=generator)
    return inputs.to(device), torch.randint(0, 4, (32,), generator=generator).to(device)


def _train(level: str, device: str, steps: int = 8) -> tuple[nn.Module, preamp.Engine, list[float]]:
    net, (inputs, targets) = _net(device), _batch(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
    net, optimizer = preamp.initialize(net, optimizer, opt_level=level, verbosity=0)
    losses: list[float] = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(inputs), targets)
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return net, preamp.engine_of(optimizer), losses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
def test_training_follows_float32(level: str, device: str) -> None:
    reference = _train("O0", device)[2]
    _, engine, losses = _train(level, device)
    assert losses[-1] < losses[0]
    # bfloat16 keeps 8 bits, so single losses may differ by 2**-8 of their value and a little more.
    assert losses == pytest.approx(reference, rel=2**-5)
    assert {scaler.device.type for scaler in engine.scalers} == {device}


@needs_cuda
def test_torch_takes_its_multi_tensor_path_for_masters() -> None:
    net = _net("cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    net, optimizer = preamp.initialize(net, optimizer, opt_level="O2", verbosity=0)
    inputs, targets = _batch("cuda")
    with preamp.scale_loss(nn.functional.cross_entropy(net(inputs), targets), optimizer) as scaled:
        scaled.backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert any("_foreach_" in event.key for event in profile.key_averages())


@needs_cuda
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_tensors_on_other_devices_are_not_cast(level: str) -> None:
    net = _net("cuda")
    preamp.initialize(net, opt_level=level, scope="thread", verbosity=0)
    matrix = torch.randn(4, 4)
    assert torch.mm(matrix, matrix).dtype is torch.float32
    assert torch.mm(matrix.cuda(), matrix.cuda()).dtype in (torch.float16, torch.bfloat16)
