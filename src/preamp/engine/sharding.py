# SPDX-License-Identifier: BSD-3-Clause
"""Models under torch's ``fully_shard``: what fits together, and gradients not reduced yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state
from preamp.core.splits import Splits
from preamp.core.tensors import is_sharded
from preamp.core.torch_private import fsdp
from preamp.engine.reductions import Reductions
from preamp.policy import Policy
from preamp.scaling import LossScaler

_FIRST_FORM = "FullyShardedDataParallel"


def check_fits(models: Sequence[nn.Module], policy: Policy, splits: Splits) -> None:
    """Refuse what the models were sharded with if it contradicts the level. Changes nothing.

    A ``MixedPrecisionPolicy`` may gather weights in another dtype than the one that the level gives
    them or computes in. In the first form of FSDP parameters are plain tensors, which do not tell
    which ranks have the rest.
    """
    parts = [part for model in models for part in model.modules()]
    kinds = {kind.__name__ for part in parts for kind in type(part).__mro__}
    if _FIRST_FORM in kinds and not splits.given:
        raise bad_state(
            f"A model is in torch's {_FIRST_FORM}",
            "Its parameters do not tell which ranks hold the rest of them, so an overflow on "
            "one rank would not reach the others",
            "Use torch.distributed.fsdp.fully_shard, or pass process_groups={group: "
            "'pipeline'} with the group it shards over",
        )
    own = policy.half_dtype
    if own is None:
        return
    for model in models:
        others = fsdp.gather_dtypes(model) - {own}
        if others:
            name = dtype_name(next(iter(others)))
            raise bad_state(
                f"fully_shard was given MixedPrecisionPolicy(param_dtype={name}), and "
                f"opt_level={policy.opt_level!r} works in {dtype_name(own)}",
                "One of the two decides in which dtype weights are gathered",
                "Leave param_dtype out, or keep it and pass opt_level='O0' with the "
                "loss_scale that it needs",
            )


def check_groups(models: Sequence[nn.Module]) -> None:
    """Refuse groups with weights of several dtypes after the cast; torch could not gather them."""
    for model in models:
        for dtypes, params in fsdp.dtypes_of_groups(model):
            if len(dtypes) > 1:
                raise bad_state(
                    f"fully_shard gathers {params[0]!r} and others together, which are "
                    f"{', '.join(sorted(map(dtype_name, dtypes)))} now",
                    "The weights of one group share a dtype; batch norms stay float32 at O2 and O5",
                    "Call fully_shard on each batch norm by itself before the modules around "
                    "it, or pass keep_batchnorm_fp32=False",
                )


class Unreduced:
    """Follows gradients that ``set_requires_gradient_sync(False)`` leaves on each rank.

    They lie inside ``fully_shard``, multiplied by the scale of their backward, until a later one
    adds to them and reduces all. That one must have the same scale.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        reductions: Reductions,
    ) -> None:
        """Watch ``models``, which ``optimizers`` update; ``reductions`` tells when they run."""
        params = [
            p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]
        ]
        reductions.on_forward = self.check_forward
        # Those with sharded parts; without any there is nothing to follow
        self.models = [model for model in models if fsdp.has_sharded_parts(model)]
        self._plain = [] if self.models else [*models]
        self._has_params = any(not is_sharded(param) for param in params)
        self._scale: tuple[LossScaler, int] | None = None

    def begin(self, scaler: LossScaler) -> None:
        """A block with ``scaler`` begins; refused if there are gradients with another scale."""
        if not self.models or self._scale is None or not self._is_held():
            self._scale = None
        elif self._scale != (scaler, scaler.generation):
            raise bad_state(
                "scale_loss was called with another loss scale than the one on gradients that "
                "set_requires_gradient_sync(False) has left unreduced",
                "They are added up before anybody can unscale them, so all backwards up to the "
                "reduction share one loss scale",
                "Accumulate one loss at a time, or sum the losses before backward",
            )

    def end(self, scaler: LossScaler) -> bool:
        """A block has ended; tell whether its gradients were left unreduced."""
        if not self.models or not self._is_held():
            self._scale = None
            return False
        self._scale = scaler, scaler.generation
        return True

    def _is_held(self) -> bool:
        return any(map(fsdp.holds_unreduced, self.models))

    def check_forward(self) -> None:
        """Refuse models sharded after `initialize`: optimizers would update other parameters."""
        if self._has_params and any(map(fsdp.is_fully_sharded, self._plain)):
            raise bad_state(
                "fully_shard was called after preamp.initialize",
                "It replaces the parameters, and the optimizers still update the earlier ones",
                "Call fully_shard(model) first, then build the optimizer, then "
                "preamp.initialize(model, optimizer)",
            )
