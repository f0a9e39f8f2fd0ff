# SPDX-License-Identifier: BSD-3-Clause
"""The half parameters of an optimizer, their float32 masters, and the gradients of both."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from preamp.core.dtypes import is_half
from preamp.core.errors import bad_type
from preamp.kernels import Ops
from preamp.optim import DirectGradients, WeightPairs, cast_state

Params = list[torch.Tensor]

_DIRECT = (torch.float32, torch.float64)


class HalfParams:
    """Parameters by what becomes of them; all lists run parallel to ``param_groups``."""

    def __init__(self, optimizer: Any, ops: Ops) -> None:
        self._optimizer = optimizer
        self._known: set[int] = set()
        self._pairs = WeightPairs(ops)
        self._memory: list[torch.Tensor] = []  # of masters, when half parameters last agreed
        self.fp16_groups: list[Params] = []  # the model's half parameters
        # their masters, which the optimizer has in their place
        self.fp32_from_fp16_groups: list[Params] = []
        # parameters that the optimizer updates itself
        self.fp32_from_fp32_groups: list[Params] = []
        self.adopt()

    # -- the parameters ------------------------------------------------------------------------

    @property
    def halves(self) -> Params:
        """All half parameters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def masters(self) -> Params:
        """All masters, in the order of `halves`."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def directs(self) -> Params:
        """All parameters without a master."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    def adopt(self) -> None:
        """Take in newly trainable parameters, all or none; else scaled gradients update them."""
        news = list(self._new_params())
        for _, _, param in news:
            if not (is_half(param) or param.dtype in _DIRECT):
                raise bad_type(
                    f"A parameter of shape {tuple(param.shape)} has dtype {param.dtype}",
                    "FP16_Optimizer takes float16, bfloat16, float32 and float64 parameters",
                    "Convert it, or leave it out of the optimizer",
                )
        for groups in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            groups += [[] for _ in range(len(self._optimizer.param_groups) - len(groups))]
        for index, place, param in news:
            self._known.add(id(param))
            if is_half(param):
                self._adopt_half(index, place, param)
            else:
                self.fp32_from_fp32_groups[index].append(param)

    def _new_params(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for index, group in enumerate(self._optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param.requires_grad and id(param) not in self._known:
                    yield index, place, param

    def _adopt_half(self, index: int, place: int, half: torch.Tensor) -> None:
        master = torch.nn.Parameter(half.detach().float())
        self._known.add(id(master))
        self._optimizer.param_groups[index]["params"][place] = master
        self.fp16_groups[index].append(half)
        self.fp32_from_fp16_groups[index].append(master)
        self._pairs.add_row(half, master)
        self._memory.append(master.detach())
        state = self._optimizer.state
        if half in state:
            state[master] = cast_state(state.pop(half), master)

    # -- weights -------------------------------------------------------------------------------

    def write_halves(self) -> None:
        """Round every master into its half parameter. Mutates the model."""
        self._pairs.write_halves()
        self._memory = [master.detach() for master in self._pairs.masters]

    def absorb(self) -> None:
        """Let half parameters see writes to masters, and masters those to half parameters.

        But for writes through ``master.data``, of which no plain parameter tells. Memory that a
        master had before ``master.data`` was assigned is free from here on.
        """
        pairs = zip(self._pairs.masters, self._memory, strict=True)
        for row, (master, before) in enumerate(pairs):
            if not master.is_set_to(before):  # ``master.data`` was assigned
                self._pairs.note_master_changed(row)
                self._memory[row] = master.detach()
        self._pairs.absorb()
        self._memory = [master.detach() for master in self._pairs.masters]


class ScaledGradients:
    """Keeps the books on which gradients carry a loss scale, and which one.

    Gradients on half parameters stay scaled, so that autograd can go on adding to them; their
    masters get the unscaled sum. A gradient on a float32 parameter is the one the optimizer uses:
    what was unscaled already steps aside once a backward, whoever runs it, reaches the parameter,
    and is added afterwards.
    """

    def __init__(self, params: HalfParams, ops: Ops) -> None:
        self._params = params
        self._ops = ops
        self._direct = DirectGradients(ops)
        self._scale: float | None = None  # of all gradients that are not unscaled
        # The gradient that was unscaled, by the id of its float32 parameter
        self._unscaled: dict[int, torch.Tensor] = {}
        # What adds to such a parameter's gradient, kept alive, since its hook lives as long
        self._adders: dict[int, Any] = {}
        # whether a backward ran whose gradients have not reached the masters
        self.is_pending = False

    def begin(self, scale: float) -> None:
        """Prepare for a backward of the loss times ``scale``. Mutates gradients."""
        self.follow(scale)
        self._scale = scale
        self.is_pending = True

    def follow(self, scale: float) -> None:
        """The loss scale has changed: bring what the next backward adds to to it."""
        if self._scale in (None, scale):
            return
        raw = self._params.halves + self._raw_directs()
        grads = [param.grad for param in raw if param.grad is not None]
        with torch.no_grad():
            self._ops.scale_add_(grads, scale / self._scale, [None] * len(grads))
        self._scale = scale

    def finish(self, scale: float, *, looks: bool) -> torch.Tensor | None:
        """Bring the masters' and the float32 parameters' gradients up to date.

        The current ``scale`` counts for gradients of a backward that went past `begin`. Returns the
        census's ``found_inf``, a float32 scalar, if it ``looks``. Does not synchronise.
        """
        if self.is_pending and self._scale is not None:
            scale = self._scale
        pairs = list(zip(self._params.halves, self._params.masters, strict=True))
        with torch.no_grad():
            self._fill_masters(pairs, 1.0 / scale)
        self._merge(1.0 / scale)
        found_inf = self._census(pairs) if looks else None
        self._scale = scale
        self.is_pending = False
        return found_inf

    def forget(self) -> None:
        """The gradients were cleared."""
        self._direct.forget()
        self._unscaled.clear()
        self._scale = None
        self.is_pending = False

    def _raw_directs(self) -> list[torch.Tensor]:
        """Parameters without a master whose gradient carries the loss scale."""
        return [
            param
            for param in self._params.directs
            if param.grad is not None and self._unscaled.get(id(param)) is not param.grad
        ]

    def step_aside(self, param: torch.Tensor) -> None:
        """A backward is about to add to the gradient of ``param``. Mutates that."""
        if self._unscaled.pop(id(param), None) is param.grad:  # both None: the script dropped all
            self._direct.set_aside_reached(param)

    def _census(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
        # What an earlier backward left is looked at again: its overflow is in the sum.
        params = [half for half, _ in pairs] + self._params.directs
        grads = [param.grad for param in params if param.grad is not None]
        return self._ops.census(grads, grads[0].device).found_inf if grads else None

    def _fill_masters(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], inverse: float) -> None:
        for _, master in pairs:
            master.grad = None  # also where the model has none: an old one must not be used again
        found = [(half.grad, master) for half, master in pairs if half.grad is not None]
        factors = {
            device: torch.tensor(inverse, dtype=torch.float32, device=device)
            for device in {grad.device for grad, _ in found}
        }
        wide = self._ops.widen_add(
            [grad for grad, _ in found],
            [factors[grad.device] for grad, _ in found],
            [None] * len(found),
        )
        for (_, master), grad in zip(found, wide, strict=True):
            master.grad = grad

    def _merge(self, inverse: float) -> None:
        factor = None if inverse == 1.0 else torch.tensor(inverse)
        self._direct.params = self._raw_directs()
        self._direct.merge(factor)
        self._direct.forget()
        self._unscaled = {}
        for param in self._params.directs:
            if param.grad is not None:
                self._unscaled[id(param)] = param.grad
                self._watch(param)

    def _watch(self, param: torch.Tensor) -> None:
        """Hear of what is added to the gradient of ``param``; not of `torch.autograd.grad`."""
        if not param.requires_grad:
            return
        adder: Any = get_gradient_edge(param).node
        if self._adders.get(id(param)) is not adder:  # not yet, or `p.data = ...` made a new one
            # Weak: a graph may keep the hook when the optimizer goes, and another one may come.
            adder.register_prehook(partial(_reached, weakref.ref(self), weakref.ref(param)))
            self._adders[id(param)] = adder


def _reached(books: weakref.ref[ScaledGradients], param: weakref.ref[Any], grads: object) -> None:
    del grads
    owner, reached = books(), param()
    if owner is not None and reached is not None:
        owner.step_aside(reached)
