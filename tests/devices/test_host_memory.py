# SPDX-License-Identifier: BSD-3-Clause
"""Bytes on a device and on the host, counted of real tensors, are those that were estimated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from cases.plain import counted
from preamp.optimizers import FusedAdam, FusedLion, FusedSGD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

OPTIMIZERS: dict[str, Any] = {
    "FusedAdam": FusedAdam,
    "FusedLion": FusedLion,
    "FusedSGD(lr=0.1, momentum=0.9)": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
}


KEPT = [(level, "float32") for level in ("O0", "O1", "O2", "O4", "O5")]
KEPT += [(level, "split") for level in WITH_MASTERS]


@pytest.mark.parametrize(("level", "masters"), KEPT)
@pytest.mark.parametrize("text", OPTIMIZERS)
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_both_places_are_counted_as_estimated(
    moments: Any, text: str, level: str, masters: Any
) -> None:
    storage = preamp.Storage(masters=masters, moments=moments, place="host")
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)).cuda()
    policy = preamp.OPT_LEVELS[level].replace(storage=storage)
    found = preamp.estimate(model, policy, text)
    optimizer = OPTIMIZERS[text](model.parameters())
    batch = torch.ones(4, 64, device="cuda")
    assert counted(model, optimizer, level, batch, storage=storage) == found.categories
    assert found.on_device < found.total
