# SPDX-License-Identifier: BSD-3-Clause
"""All masters of one optimizer, and their exchange with its ``param_groups``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.kernels import Ops
from preamp.optim.half_gradient import zero_
from preamp.optim.master_parameter import MasterParameter, is_master
from preamp.optim.twin import Twin

Group = dict[str, Any]
NameOf = Callable[[torch.Tensor], str]


class Masters:
    """The twins of an optimizer.

    The optimizer's group dicts, their ``params`` lists and its ``state`` keep their identity:
    schedulers and optimizers hold references to them. Only list entries are exchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ops: Ops,
        name_of: NameOf,
        known: dict[int, Twin] | None = None,
    ) -> None:
        """Start without masters; `adopt` makes them.

        Args:
            optimizer: Its half parameters get masters.
            ops: Back end for the arithmetic.
            name_of: Names parameters in messages.
            known: Twins of all optimizers together, by ``id(half)``; extended. A weight that two
                optimizers update has one master, as it has one gradient.
        """
        self._optimizer = optimizer
        self._ops = ops
        self._name_of = name_of
        self._known: dict[int, Twin] = {} if known is None else known
        self._by_half: dict[int, Twin] = {}

    def __iter__(self) -> Iterator[Twin]:
        """Iterate over the twins in the order they were made."""
        return iter(self._by_half.values())

    def __len__(self) -> int:
        """How many masters there are."""
        return len(self._by_half)

    def of_half(self, half: torch.Tensor) -> Twin | None:
        """Return the twin of a model parameter, or ``None``."""
        return self._by_half.get(id(half))

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Give every trainable half parameter in the optimizer a master, if it has none.

        Called again before each backward and step: a parameter that was frozen at first gets
        its master when it is unfrozen.

        Args:
            originals: float32 values from before the cast, by ``id(parameter)``. Their storage
                becomes the master's. Without one the half value is widened.
        """
        for group in self._optimizer.param_groups:
            params: list[Any] = group["params"]
            for index, param in enumerate(params):
                if not is_master(param) and is_half(param) and param.requires_grad:
                    params[index] = self._adopt_one(param, (originals or {}).get(id(param)))

    def _adopt_one(self, half: Any, original: torch.Tensor | None) -> MasterParameter:
        twin = self._by_half.get(id(half))
        if twin is None:
            twin = self._known.get(id(half))
            if twin is None:
                data = half.detach().float() if original is None else original.float()
                twin = self._known[id(half)] = Twin(half, data, self._name_of(half), self._ops)
            else:
                twin.is_shared = True
            self._by_half[id(half)] = twin
        state: dict[Any, Any] = self._optimizer.state
        if half in state:
            state[twin.master] = cast_state(state.pop(half), twin.master)
        return twin.master

    def release(self) -> None:
        """Put the model parameters back into the groups, and the state under them."""
        state: dict[Any, Any] = self._optimizer.state
        by_master = {id(twin.master): twin for twin in self}
        for group in self._optimizer.param_groups:
            params: list[Any] = group["params"]
            for index, param in enumerate(params):
                twin = by_master.get(id(param))
                if twin is not None:
                    params[index] = twin.half
                    if param in state:
                        state[twin.half] = state.pop(param)
        for twin in self:
            twin.master.twin = None
        self._by_half.clear()

    def zero_gradients(self, zero_rest: Callable[[], object], *, in_backward: bool) -> object:
        """Fill gradients with zeros, ``zero_grad(set_to_none=False)``.

        Args:
            zero_rest: The optimizer's own, whose result is returned. Half gradients are away
                meanwhile: it would read the masters' gradients, and thereby make them.
            in_backward: Whether a backward is under way; what came before it stays noted then.
        """
        away: list[tuple[Twin, torch.Tensor]] = []
        for twin in self:
            grad = twin.half.grad
            if grad is not None:
                zero_(grad)
            if not in_backward:
                twin.end()
                if grad is not None:
                    twin.drop()
                    away.append((twin, grad))
        try:
            return zero_rest()
        finally:
            for twin, grad in away:
                twin.take_zeros(grad)

    def absorb_external_writes(self) -> None:
        """Let every master see what was written to its half weight from outside."""
        for twin in self:
            twin.absorb_external_write()

    def write_halves(self) -> None:
        """Round every master into its half weight; the invariant after every step.

        Fused optimizers have done so in their update.
        """
        twins = [twin for twin in self if not twin.take_rounded()]
        with torch.no_grad():
            self._ops.cast_copy_(
                [twin.master.detach() for twin in twins],
                [twin.held.own(twin.half.detach()) for twin in twins],
            )
        for twin in twins:
            twin.note_written()


def cast_state(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Cast the floating tensors of a parameter's state that have its shape to its dtype.

    Step counters and other tensors of another shape stay as they are.
    """
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and key != "step"
            and value.dtype != param.dtype
        ):
            state[key] = value.to(param.dtype)
    return state
