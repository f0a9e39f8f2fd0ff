# SPDX-License-Identifier: BSD-3-Clause
"""What all fused optimizers share.

They follow Apex where scripts can tell: the step counter lies in the group, ``zero_grad`` obeys
``set_grad_none``, and sparse gradients are refused. Everything is collected and checked before
anything is changed, so a refused step leaves no group half-updated.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import required

from preamp.core.dtypes import math_dtype
from preamp.core.splits import Splits
from preamp.core.tensors import are_same, dtype_of, has_sharded
from preamp.kernels.shards import place_gradients
from preamp.optim.fused.checks import check_gradient, check_group
from preamp.optim.fused.entries import Entries, entries_of
from preamp.optim.master_parameter import without_masters

Group = dict[str, Any]
Closure = Callable[[], Any]
REQUIRED: Any = required
"""Default of a hyper-parameter that a group has to say if the constructor does not."""


def _zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


class FusedOptimizer(torch.optim.Optimizer, abc.ABC):
    """Base of the optimizers in `preamp.optimizers`; implements everything but the step."""

    set_grad_none: bool
    backend: str = "auto"
    """Name of the kernels that compute the update; see ``preamp.kernels.backend``."""

    splits: Splits = Splits()
    """Over which ranks parameters are split; ``DTensor`` parameters say so themselves."""

    _step_supports_amp_scaling = True
    """Tells torch's ``GradScaler`` to hand over what it knows instead of reading it."""

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that copies and pickles keep; torch's optimizers carry their groups only."""

    _wide_state: ClassVar[frozenset[str]] = frozenset()
    """State that is float32 even where the parameter is half; the rest has its dtype."""

    @abc.abstractmethod
    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters."""

    def add_param_group(self, param_group: Group) -> None:
        """Add a group.

        Args:
            param_group: ``params``, and options in place of the constructor's.

        Raises:
            TypeError: It is no dict, or an option is no number.
            ValueError: An option is negative, or one of its parameters is in a group already.
        """
        if isinstance(param_group, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            check_group(type(self).__name__, param_group)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them rather than fill them with zeros; by default as the
                constructor's ``set_grad_none`` says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data.

        A counter that moved to the device, where only that knows of skipped steps, is a number
        again, unless the optimizer is ``capturable``. Synchronises in this case.
        """
        state = super().state_dict()
        if not self._counts_on_device:
            for group in state["param_groups"]:
                if isinstance(group.get("step"), torch.Tensor):
                    group["step"] = int(group["step"])
        return state

    @property
    def _counts_on_device(self) -> bool:
        """Whether ``group["step"]`` is a tensor by the user's choice."""
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned.

        torch casts loaded state to the parameter's dtype on the way. State that is kept in
        float32 here is taken from ``state_dict`` itself, so that it does not pass through half.

        Raises:
            ValueError: Its groups do not match those of this optimizer.
        """
        given = state_dict

        def note(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            nonlocal given
            given = final  # what the user's own hooks have made of it

        def restore(_: torch.optim.Optimizer) -> None:
            self._restore_wide(given)

        handles = (
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _restore_wide(self, given: dict[str, Any]) -> None:
        ids = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        own = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(ids, own, strict=True):
            for key, value in given["state"].get(number, {}).items():
                if key in self._wide_state and isinstance(value, torch.Tensor):
                    wide = value.to(param.device, math_dtype(param.dtype))
                    self.state[param][key] = wide

    def __getstate__(self) -> dict[str, Any]:
        names = (*self._settings, "backend")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # from a file that did not know an option yet
            for name, default in self.defaults.items():
                if default is not REQUIRED and name != "differentiable":  # which torch puts there
                    group.setdefault(name, default)

    def _collect(self) -> list[tuple[Group, Entries]]:
        """All groups that have parameters, with the entries of those that have gradients."""
        work: list[tuple[Group, Entries]] = []
        for group in self.param_groups:
            if has_sharded(group["params"]):
                place_gradients(without_masters(group["params"]))
            entries = entries_of(group["params"])
            self._check(entries)
            if group["params"]:
                work.append((group, entries))
        return work

    def _check(self, entries: Entries) -> None:
        for param, grad in entries.kinds() if entries else ():
            check_gradient(type(self).__name__, param, grad)

    def _state(
        self,
        params: Sequence[torch.Tensor],
        key: str,
        make: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = _zeros,
    ) -> list[torch.Tensor]:
        """The state tensors called ``key`` of parameters of one dtype, made where there is none."""
        if not params:
            return []
        dtype = math_dtype(params[0].dtype) if key in self._wide_state else params[0].dtype
        states = self._states_of(params)
        found: list[Any] = [state.get(key) for state in states]
        if not any([value is None for value in found]) and set(map(dtype_of, found)) == {dtype}:
            return found
        for place, (param, state, value) in enumerate(zip(params, states, found, strict=True)):
            if value is None:
                found[place] = state[key] = make(param, dtype)
            elif value.dtype is not dtype:  # the model was cast, and the state with it
                found[place] = state[key] = value.to(dtype)
        return found

    def _states_of(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The state dicts of ``params``: those of the step before, if all is where it was then.

        To look one up takes a call of Python, which ``torch.Tensor.__hash__`` is.
        """
        state: dict[Any, dict[str, Any]] = self.state
        kept: _KeptStates = vars(self).setdefault("_kept_states", {})
        ids, every = list(map(id, params)), list(state.values())
        known = kept.get(ids[0])
        if known is not None and known[0] == ids and are_same(every, known[1]):
            return known[2]
        states = [state[param] for param in params]
        kept[ids[0]] = (ids, list(state.values()), states)
        return states


_KeptStates = dict[int, tuple[list[int], list[dict[str, Any]], list[dict[str, Any]]]]
"""By the first parameter: all of the batch, all states of the optimizer then, and the batch's."""


def evaluate(closure: Closure | None) -> Any:
    """Call the closure with gradients enabled, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def scalar_on(
    value: float | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``value`` as a 0-dim tensor; a number is filled in, since copying it would synchronise."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def rate_of(group: Group) -> float | torch.Tensor:
    """The group's learning rate; of a tensor with one element, whatever its shape, a scalar."""
    lr: float | torch.Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, torch.Tensor) else lr
