# SPDX-License-Identifier: BSD-3-Clause
"""A demo run on several ranks: who shares what, and what the ranks have to say in the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from preamp.core.errors import bad_value, unavailable
from preamp.demo.model import GPT
from preamp.distributed.groups import launched_ranks, shard_fully
from preamp.parallel import DistributedDataParallel

Parallel = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank says of a training, to be compared with the others."""

    rank: int  # its number
    steps_skipped: int  # steps not taken
    loss_scale: float  # at the end
    losses: str  # digest of the curve
    weights: str  # digest of the weights that it has; parts where they are sharded


def choose_parallel(name: str) -> Parallel:
    """Turn the option, ``"auto"`` or one of `Parallel`, into what this process can do."""
    ranks = launched_ranks()
    if name == "auto":
        return "none" if ranks == 1 else "ddp"
    for known in get_args(Parallel):
        if name == known and (name == "none") == (ranks == 1):
            return known
    is_known = name in get_args(Parallel)
    having = f" with {ranks} process{'es' * (ranks != 1)}"
    raise bad_value(
        f"--parallel {name}{having}" if is_known else f"--parallel {name!r}",
        "Choose none for one process, and ddp or fsdp for several",
        "Start several with torchrun --nproc-per-node 2 -m preamp demo --parallel ddp",
    )


def require_sharding(parallel: str, device: torch.device) -> None:
    """Refuse to shard where this torch, as 2.6, lacks events of CPU streams for ``fully_shard``."""
    if (
        parallel == "fsdp"
        and device.type == "cpu"
        and not hasattr(torch.cpu.Stream, "record_event")
    ):
        raise unavailable(
            f"--parallel fsdp on CPUs with torch {torch.__version__}",
            "Its fully_shard runs on accelerators only",
            "Choose --parallel ddp, or install a newer torch",
        )


def shard_before(model: GPT, parallel: str) -> None:
    """Do what has to be done before the optimizer is made. Mutates ``model``."""
    if parallel == "fsdp":
        shard_fully(model, model.blocks)


def wrap_after(model: GPT, parallel: str) -> nn.Module:
    """Do what follows ``initialize``; return what runs forward."""
    return DistributedDataParallel(model) if parallel == "ddp" else model


def digest(values: object) -> str:
    """Return a short text that is equal where all of ``values`` are."""
    found = hashlib.sha256()
    if isinstance(values, nn.Module):
        for param in cast("Iterable[Any]", values.parameters()):
            own = (param.to_local() if hasattr(param, "to_local") else param).detach()
            found.update(own.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    else:
        found.update(repr(values).encode())
    return found.hexdigest()[:12]


def agreement_of(ranks: tuple[RankResult, ...], parallel: str) -> str:
    """Say whether ranks agree on what they have to agree on."""
    facts = {
        "losses": {rank.losses for rank in ranks},
        "skipped steps": {rank.steps_skipped for rank in ranks},
        "loss scale": {rank.loss_scale for rank in ranks},
    }
    if parallel != "fsdp":  # where each has weights of its own
        facts["weights"] = {rank.weights for rank in ranks}
    different = [name for name, found in facts.items() if len(found) > 1]
    if different:
        return f"The {len(ranks)} ranks differ in {', '.join(different)}."
    return f"The {len(ranks)} ranks agree on {', '.join(facts)}."
