# SPDX-License-Identifier: BSD-3-Clause
"""What each of two ranks does to train the demo's model; child processes import it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import torch

from cases.demo import CORPUS, config
from cases.levels import LEVEL_NAMES
from preamp.demo.config import DemoConfig
from preamp.demo.records import to_json
from preamp.demo.run import prepare, run
from preamp.demo.train import Watcher

WAYS = ("ddp", "fsdp") if hasattr(torch.cpu.Stream, "record_event") else ("ddp",)
"""Without the last where torch's ``fully_shard`` does not run on CPUs, as in torch 2.6."""


def small(**changes: Any) -> DemoConfig:
    """What one process and several train alike."""
    return replace(config(*LEVEL_NAMES, steps=6), batch=4, **changes)


def train(rank: int) -> dict[str, Any]:
    """Train in each way; returns the results as they would be written, by way."""
    os.environ.update(WORLD_SIZE="2", RANK=str(rank))  # as torchrun does
    found: dict[str, Any] = {}
    for way in WAYS:
        result = run(prepare(small(parallel=way, ranks=2), CORPUS), Watcher())
        found[way] = json.loads(json.dumps(to_json(result)))
    return found
