# SPDX-License-Identifier: BSD-3-Clause
"""Copies and pickles of models: plain ones, in float32, with the exact values.

Where a half weight and its master were, there is one float32 parameter. A copied optimizer does
not know whether its model was copied with it, so where there are masters it refuses to step. At
levels with half weights and no masters (O3) models are copied as torch copies them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from preamp.casting.io import remove_forward
from preamp.casting.state_hooks import save_pretrained
from preamp.core.dtypes import is_half
from preamp.core.errors import bad_state, with_article
from preamp.core.link import ATTRIBUTE, EngineHook
from preamp.core.pytree import map_leaves
from preamp.core.tensors import version_of
from preamp.core.torch_private.modules import remove_hooks, with_step_pre_hook
from preamp.core.torch_private.shards import set_data
from preamp.core.undo import UndoStack, set_attribute
from preamp.engine.params import twin_of
from preamp.optim import is_master
from preamp.optim.fused.base import FusedOptimizer

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore

_COPY: Final = "__deepcopy__"
_PICKLE: Final = "__reduce_ex__"
_ROOMS = ("engine.", "compat.", "distributed.", "checkpoint.", "optim.table")
_MAKERS: Final = tuple(f"preamp.{room}" for room in _ROOMS)
"""The modules whose methods and hooks an engine puts on optimizers."""
_STASH: Final = "_amp_stash"  # Apex's attribute, which knows the session


class Copies:
    """What makes copies of one engine's models and optimizers."""

    def __init__(self, engine: EngineCore) -> None:
        """Copy with the weights of ``engine``, as long as it lives.

        A layer that models share must not keep the engine of one that was dropped.
        """
        self._engine = weakref.ref(engine)
        # Of half tensors without a master, as long as a pickler holds them: for what is tied
        self._widened: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    @property
    def has_masters(self) -> bool:
        """Whether half weights have masters, which an optimizer updates in their place."""
        engine = self._engine()
        return engine is not None and engine.policy.master_weights

    # -- copy.deepcopy -----------------------------------------------------------------------

    def fill(self, module: nn.Module, memo: dict[int, Any]) -> None:
        """Let ``copy.deepcopy`` find float32 copies of the module's own half tensors.

        Mutates ``memo``, and what a list of parameters, copied before, has put into it.
        """
        for tensor in _own_tensors(module):
            master = self._master_of(tensor)
            if master is not None:
                copy.deepcopy(master, memo)  # which notes it as the half weight's copy, too
            elif (dtype := self._dtype_of(tensor)) is not tensor.dtype:
                made = memo.get(id(tensor))
                if made is None:
                    memo[id(tensor)] = _like(tensor, tensor.detach().to(dtype))
                elif is_half(made):
                    set_data(made, tensor.detach().to(dtype))

    # -- pickle ------------------------------------------------------------------------------

    def plain_state(self, state: Any) -> Any:
        """The attributes of a module as those of a plain float32 one; anything else as it is.

        Masters are in their half weights' places, so that what is tied stays so.
        """
        if not (isinstance(state, dict) and "_parameters" in state and "_buffers" in state):
            return cast("Any", state)
        plain = SimpleNamespace()
        own: dict[str, Any] = vars(plain)
        for name, value in cast("dict[str, Any]", state).items():
            is_table = "_hooks" in name and isinstance(value, dict)
            own[name] = cast("Any", value).copy() if is_table else map_leaves(self._exact, value)
        _strip(plain)
        return own

    def _exact(self, tensor: torch.Tensor) -> torch.Tensor:
        master = self._master_of(tensor)
        if master is not None:
            return master
        dtype = self._dtype_of(tensor)
        if tensor.dtype is dtype:
            return tensor
        key = id(tensor), version_of(tensor), tensor.data_ptr()
        made = self._widened.get(key)
        if made is None:
            made = self._widened[key] = _like(tensor, tensor.detach().to(dtype))
            vars(made).update(vars(tensor))
        return made

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """That from before the cast."""
        engine = self._engine()
        dtypes = {} if engine is None else engine.conversion.dtypes
        return dtypes.get(id(tensor), tensor.dtype) if is_half(tensor) else tensor.dtype

    def _master_of(self, tensor: torch.Tensor) -> nn.Parameter | None:
        engine = self._engine()
        twin = None if engine is None else twin_of(tensor, engine.sessions.values())
        return None if twin is None else twin.master


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _strip(part: Any) -> None:
    """Take away what an engine has put on a module, in a copy of it or of its attributes."""
    own = cast("dict[str, Any]", vars(part))
    remove_hooks(part, lambda hook: isinstance(hook, EngineHook))
    remove_forward(part)
    for name in (_COPY, _PICKLE, ATTRIBUTE):
        own.pop(name, None)
    saves = own.get("save_pretrained")
    if isinstance(saves, MethodType) and saves.__func__ is save_pretrained:
        del own["save_pretrained"]


# -- what is put on models and optimizers ---------------------------------------------------------


class _Door:
    """An attribute of a module in place of a method of its class; see `Copies`."""

    def __init__(self, copies: Copies, module: nn.Module) -> None:
        self._copies = copies
        self._module = weakref.ref(module)

    def _found(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise bad_state(
                "A shallow copy of a model that has been deleted was copied or pickled",
                "It shares the model's attributes, and copies as the model itself",
                "Keep the model, or make the copy by copy.deepcopy",
            )
        return module


class CopyPlain(_Door):
    """``__deepcopy__`` of a module: without engine, hooks and gradients."""

    def __call__(self, memo: dict[int, Any]) -> Any:
        """Return the copy; see `copy.deepcopy`."""
        module, copies = self._found(), self._copies
        copies.fill(module, memo)
        own = vars(module)
        doors = {name: own.pop(name) for name in (_COPY, _PICKLE)}
        try:
            made = copy.deepcopy(module, memo)
        finally:
            own.update(doors)
        _strip(made)
        return made


class PicklePlain(_Door):
    """``__reduce_ex__`` of a module: pickles are what deep copies are, and need no preamp."""

    def __call__(self, protocol: Any) -> Any:
        """Return what pickles have; see `pickle`."""
        module = self._found()
        make, args, *rest = cast("Any", type(module)).__reduce_ex__(module, protocol)
        plain = self._copies.plain_state
        return (make, tuple(map(plain, args)), *map(plain, rest))


class PickleOptimizer:
    """``__reduce_ex__`` of an optimizer, which `copy.deepcopy` calls as well.

    torch's optimizers leave out all attributes but three. A class may have all of them copied; then
    those of the engine, which lead to locks and to the models, are taken out here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Let copies of ``optimizer`` refuse to step, if it has masters."""
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, protocol: Any) -> Any:
        """Return what pickles have; see `pickle`."""
        optimizer = cast("torch.optim.Optimizer", self._optimizer())
        make, args, *rest = cast("Any", type(optimizer)).__reduce_ex__(optimizer, protocol)
        if rest and isinstance(rest[0], dict) and "param_groups" in rest[0]:
            rest[0] = _without_engine(cast("dict[str, Any]", rest[0]))
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if any(map(is_master, params)):
                rest[0] = with_step_pre_hook(rest[0], refuse_step)
        return (make, args, *rest)


def _without_engine(state: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an optimizer without what an engine has put there, its hooks included."""
    plain = SimpleNamespace()
    own: dict[str, Any] = vars(plain)
    for name, value in state.items():
        if "_hooks" in name and isinstance(value, dict):
            own[name] = cast("Any", value).copy()
        elif name in (ATTRIBUTE, _PICKLE, _STASH):
            continue
        # A scheduler puts a function around the step, which leads to the engine as well.
        elif not ((isinstance(value, MethodType) or name == "step") and _is_of_engine(value)):
            own[name] = value
    remove_hooks(plain, _is_of_engine)
    return own


def _is_of_engine(value: object) -> bool:
    """Whether a hook or a method is one of those that engines attach."""
    function = getattr(value, "__func__", getattr(value, "func", value))
    function = getattr(function, "__func__", function)  # of a partial of a method
    module = str(getattr(function, "__module__", ""))
    return module.startswith(_MAKERS)


def refuse_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Step pre-hook of a copied optimizer, whose parameters are copies of masters: nobody's."""
    del args, kwargs
    kind = with_article(type(optimizer).__name__)
    raise bad_state(
        f"optimizer.step() was called on {kind} that is a copy of one with float32 masters",
        "A copy of a master is no model's: at O2 and O5 copies of models are plain float32 ones, "
        "with parameters of their own",
        "Build one for the copied model, of model.parameters(), and load optimizer.state_dict()",
    )


def attach_copies(modules: Iterable[nn.Module], copies: Copies, undo: UndoStack) -> None:
    """Let ``modules`` be copied and pickled as plain float32 ones."""
    for part in modules:
        for name, door in ((_COPY, CopyPlain(copies, part)), (_PICKLE, PicklePlain(copies, part))):
            undo.push(partial(_remove, part, name, door))
            vars(part)[name] = door


def attach_optimizer_copies(
    optimizer: torch.optim.Optimizer, copies: Copies, undo: UndoStack
) -> None:
    """Let ``optimizer`` be copied and pickled without the engine.

    Where it has masters, its copies refuse to step. Otherwise there is nothing to do if its class
    has torch's way to say what is copied.
    """
    kind: Any = type(optimizer)
    own = getattr(kind, "__getstate__", None), kind.__reduce_ex__, kind.__reduce__
    usual = object.__reduce_ex__, object.__reduce__
    ways = [(of.__getstate__, *usual) for of in (torch.optim.Optimizer, FusedOptimizer)]
    if not copies.has_masters and own in ways:
        return
    set_attribute(optimizer, _PICKLE, PickleOptimizer(optimizer), undo)


def _remove(part: nn.Module, name: str, door: _Door) -> None:
    if vars(part).get(name) is door:  # not one of a later engine
        del vars(part)[name]
