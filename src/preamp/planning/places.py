# SPDX-License-Identifier: BSD-3-Clause
"""Which tensors a level makes half: found by one forward at it, not by a second table of casts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preamp.core.dtypes import HALF_DTYPES, is_half
from preamp.engine.initialize import create_engine
from preamp.kernels.observe import ObservedOps
from preamp.planning.forecast import Range
from preamp.planning.peak import LossFn
from preamp.planning.ranges import ModulePath, new_values
from preamp.policy import Policy


def in_bfloat16(policy: Policy) -> Policy:
    """The same casts with bfloat16 in place of float16.

    Where values are half is the same for both, but float16 products may run in float32 on a CPU,
    and values too large for float16 would be seen.
    """
    is_cast = policy.cast_model_type in HALF_DTYPES
    return policy.replace(
        cast_model_type=torch.bfloat16 if is_cast else policy.cast_model_type,
        patch_torch_functions_type=torch.bfloat16 if policy.patch_torch_functions else None,
        loss_scale=1.0,
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Where a level computes or stores in half.

    Attributes:
        half: Names of operations, and of parameters and buffers, that are half.
        known: Names of all operations that were seen.
        passing: float32 parameters that are cast to half where they are used, so that their
            gradients are half until they arrive.
        half_outputs: Modules that return half tensors.
        computing: Modules in which something is computed in half.
    """

    half: frozenset[str]
    known: frozenset[str]
    passing: frozenset[str]
    half_outputs: frozenset[str]
    computing: frozenset[str]

    def holds(self, values: Range) -> bool:
        """Whether the level has these values in half."""
        name = values.name
        if values.what == "activation":
            owner = name.partition(": ")[0]
            return name in self.half if name in self.known else owner in self.computing
        if values.what == "gradient" and name.endswith(" output"):
            return name.removesuffix(" output") in self.half_outputs
        return name in self.half or (values.what != "update" and name in self.passing)


NOWHERE = Places(*[frozenset[str]()] * 5)
"""Of a level that cannot run."""


def find_places(model: nn.Module, policy: Policy, loss_fn: LossFn, batch: Any) -> Places:
    """Run one forward at a policy, on a float32 copy that is given back in float32."""
    engine = create_engine(model, None, policy)
    half, known, outputs, computing = set[str](), set[str](), set[str](), set[str]()

    def note_output(name: str, output: torch.Tensor) -> None:
        if is_half(output):
            outputs.add(name)

    path = ModulePath(model, note_output)

    def watch(func: Any, ins: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        op = str(func.overloadpacket)
        values = new_values(op, ins, outs)
        if values is not None:
            name = path.next_op(op)
            known.add(name)
            if is_half(values):
                half.add(name)
                if "norm" not in op:  # norms take half inputs with float32 weights as they are
                    computing.add(name.partition(": ")[0])

    try:
        path.start()
        with ObservedOps(watch), torch.no_grad():
            loss_fn(model, batch)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_half(tensor):
                half.add(name)
    finally:
        path.remove()
        engine.close()
    passing = {
        name
        for name, _ in model.named_parameters()
        if policy.patch_torch_functions and (name.rpartition(".")[0] or "model") in computing
    }
    return Places(*map(frozenset, (half, known, passing, outputs, computing)))
