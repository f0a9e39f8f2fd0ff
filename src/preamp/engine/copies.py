# SPDX-License-Identifier: BSD-3-Clause
"""Copies and pickles of models: plain ones, in float32, with the exact values.

Where a half weight and its master were, there is one float32 parameter. So an optimizer that is
copied or pickled together with its model, which torch does by its groups and state alone, is one
of the plain copy. At levels with half weights and no masters (O3) models are copied as torch copies
them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from preamp.casting.state_hooks import save_pretrained
from preamp.core.dtypes import is_half
from preamp.core.errors import bad_state
from preamp.core.link import ATTRIBUTE, EngineHook
from preamp.core.pytree import map_leaves
from preamp.core.tensors import version_of
from preamp.core.torch_private.modules import remove_hooks
from preamp.core.torch_private.shards import set_data
from preamp.core.undo import UndoStack
from preamp.optim import is_master

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore

_COPY: Final = "__deepcopy__"
_PICKLE: Final = "__reduce_ex__"


class Copies:
    """What makes copies of one engine's models."""

    def __init__(self, engine: EngineCore) -> None:
        """Copy with the weights of ``engine``, as long as it lives.

        A layer that models share must not keep the engine of one that was dropped.
        """
        self._engine = weakref.ref(engine)
        # Of half tensors without a master, as long as a pickler holds them: for what is tied
        self._widened: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    def attach(self, modules: Iterable[nn.Module], undo: UndoStack) -> None:
        """Let each of ``modules`` be copied and pickled as a plain float32 one, until ``undo``.

        By attributes in place of methods of its class; a shallow copy of it has them, too, and is
        copied as the module itself.
        """
        for part in modules:
            own = weakref.ref(part)
            for name, make in ((_COPY, self._copied), (_PICKLE, self._pickled)):
                door = partial(make, own)
                undo.push(partial(_remove, part, name, door))
                vars(part)[name] = door

    def _copied(self, of: weakref.ref[nn.Module], memo: dict[int, Any]) -> Any:
        """A module without engine, hooks and gradients; see `copy.deepcopy`.

        Mutates ``memo``, and what a list of parameters, copied before, has put into it.
        """
        module = _alive(of)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            exact, made = self._exact(tensor), cast("Any", memo.get(id(tensor)))
            if is_master(exact):
                copy.deepcopy(exact, memo)  # which notes it as the half weight's copy, too
            elif exact is not tensor and made is None:
                memo[id(tensor)] = copy.deepcopy(exact)
            elif exact is not tensor and is_half(made):
                set_data(made, exact.detach().clone())
        own = vars(module)
        doors = {name: own.pop(name) for name in (_COPY, _PICKLE)}
        try:
            made = copy.deepcopy(module, memo)
        finally:
            own.update(doors)
        _strip(made)
        return made

    def _pickled(self, of: weakref.ref[nn.Module], protocol: Any) -> Any:
        """What pickles have of a module: what deep copies are, and no preamp; see `pickle`."""
        module = _alive(of)
        make, args, *rest = cast("Any", type(module)).__reduce_ex__(module, protocol)
        return (make, tuple(map(self._plain, args)), *map(self._plain, rest))

    def _plain(self, state: Any) -> Any:
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
        """Its master, or the tensor in the dtype from before the cast."""
        engine = self._engine()
        if engine is None or not is_half(tensor):
            return tensor
        twin = engine.twin_of(tensor)
        if twin is not None:
            return twin.master
        dtype = engine.conversion.dtypes.get(id(tensor), tensor.dtype)
        if tensor.dtype is dtype:
            return tensor
        key = id(tensor), version_of(tensor), tensor.data_ptr()
        made = self._widened.get(key)
        if made is None:
            made = tensor.detach().to(dtype)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            vars(made).update(vars(tensor))
            self._widened[key] = made
        return made


def _alive(of: weakref.ref[nn.Module]) -> nn.Module:
    module = of()
    if module is None:
        raise bad_state(
            "A shallow copy of a model that has been deleted was copied or pickled",
            "It shares the model's attributes, and copies as the model itself",
            "Keep the model, or make the copy by copy.deepcopy",
        )
    return module


def _strip(part: Any) -> None:
    """Take away what an engine has put on a module, in a copy of it or of its attributes."""
    own = cast("dict[str, Any]", vars(part))
    remove_hooks(part, lambda hook: isinstance(hook, EngineHook))
    for name in (_COPY, _PICKLE, ATTRIBUTE):
        own.pop(name, None)
    saves = own.get("save_pretrained")
    if isinstance(saves, MethodType) and saves.__func__ is save_pretrained:
        del own["save_pretrained"]


def _remove(part: nn.Module, name: str, door: object) -> None:
    if vars(part).get(name) is door:  # not one of a later engine
        del vars(part)[name]
