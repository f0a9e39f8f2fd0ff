# SPDX-License-Identifier: BSD-3-Clause
"""Replace the batch norms of a model by synchronised ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from preamp.core.errors import bad_value
from preamp.distributed.sync_batchnorm.module import SyncBatchNorm

_BATCH_NORM: Any = nn.BatchNorm1d.__bases__[0]


def convert_syncbn_model(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> nn.Module:
    """Replace every batch norm in ``module`` by a `SyncBatchNorm` with the same values.

    Weights and biases become new parameters: convert before the optimizer is built, and before
    ``preamp.initialize``. Running statistics stay the same tensors. Training mode and
    ``requires_grad`` are carried over, hooks are not. Instance norms stay what they are.

    Args:
        module: Any model; a batch norm used in several places stays one layer.
        process_group: The ranks to share statistics with; ``None`` for all.
        channel_last: Whether the inputs have their channels last.

    Returns:
        ``module``, or its replacement if it is a batch norm itself.

    Raises:
        ValueError: A lazy batch norm does not know its number of channels yet; nothing was
            replaced.

    Mutates:
        ``module``.
    """
    made: dict[int, nn.Module] = {}
    tree: Any = module
    for name, old in tree.named_modules():
        if isinstance(old, _BATCH_NORM):
            _refuse_lazy(name, old)
            made[id(old)] = _synchronised(old, process_group, channel_last)
    for path, old in list(tree.named_modules(remove_duplicate=False)):
        if path and id(old) in made:
            tree.set_submodule(path, made[id(old)])
    return made.get(id(module), module)


def _refuse_lazy(name: str, old: Any) -> None:
    if old.num_features == 0:
        raise bad_value(
            f"The batch norm {name!r} does not know its number of channels yet",
            "Allowed are batch norms with parameters",
            "Run one forward before convert_syncbn_model",
        )


def _synchronised(
    old: Any, process_group: dist.ProcessGroup | None, channel_last: bool
) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        process_group,
        channel_last,
        getattr(old, "fuse_relu", False),
    )
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, name, getattr(old, name))
    for name in ("weight", "bias"):
        param: torch.Tensor | None = getattr(old, name)
        if param is not None:
            copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            setattr(new, name, copy)
    return new.train(old.training)
