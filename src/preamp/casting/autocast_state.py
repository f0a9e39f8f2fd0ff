# SPDX-License-Identifier: BSD-3-Clause
"""torch's own thread-local autocast state: read, saved, set back.

It says whether casts are active, but for thread-wide ones outside of models. Nothing in this file
remembers anything between calls except which device types may have an autocast state at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch.torch_version import TorchVersion

from preamp.core.dtypes import HALF_DTYPES
from preamp.core.torch_private.scripting import not_compiled_alone

P = ParamSpec("P")
R = TypeVar("R")

CASTABLE: Final = (*HALF_DTYPES, torch.float32)
"""What casts change; float64 they leave alone."""

# ``torch.is_autocast_enabled`` raises for a device type without an autocast back end ("meta"), so
# the types that may be asked are listed; a third-party back end joins when an engine names it.
_device_types: set[str] = {"cpu", "cuda", "xpu", "mps", "hpu", "xla"}


def know_device_types(device_types: Iterable[str]) -> None:
    """Let the casts act on further device types (those of third-party back ends)."""
    _device_types.update(filter(torch.amp.is_autocast_available, device_types))


def is_any_autocast_on() -> bool:
    """Whether autocast is on for this thread, for tensors of any device type."""
    return any(map(torch.is_autocast_enabled, _device_types))


def casting_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Device type of the first floating argument on which casts are active; none with ``out=``."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        # In one piece, since every call of a wrapped function asks.
        if isinstance(arg, torch.Tensor):
            kind = arg.device.type if arg.is_floating_point() else None
            if kind not in _device_types or not torch.is_autocast_enabled(kind):
                continue
        elif isinstance(arg, (list, tuple)):
            kind = casting_device(cast("Sequence[Any]", arg), {})
        else:
            continue
        if kind is not None:
            return None if kwargs.get("out") is not None else kind
    return None


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """Keep ``torch.compile`` out of ``fn``, which sets the autocast state.

    Traced into a graph, setting the state takes place while tracing and has no effect on what the
    compiled graph computes; a break of the graph makes it happen at run time. torch's decorator
    for this imports the whole compiler, so it is applied at the first call: by then a training
    program has made an optimizer, which imports the compiler too.
    """
    disabled: list[Callable[P, R]] = []

    @not_compiled_alone
    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not disabled:
            disabled.append(cast("Any", torch.compiler).disable(fn))
        return disabled[0](*args, **kwargs)

    return call


Devices = dict[str, tuple[bool, torch.dtype]]
"""By device type whether casts are on, and to what."""


@dataclass(frozen=True, slots=True)
class AutocastState:
    """One thread's autocast state, or that of some device types."""

    devices: Devices
    cache_enabled: bool

    @staticmethod
    def capture(kinds: Iterable[str] = _device_types) -> AutocastState:
        """Read the calling thread's state."""
        return AutocastState(states_of(kinds), torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Make the calling thread's state this one (the nesting count is not part of it)."""
        now = states_of(self.devices)
        if now != self.devices:
            for kind, (enabled, dtype) in self.devices.items():
                if now[kind][0] != enabled:
                    torch.set_autocast_enabled(kind, enabled)
                if now[kind][1] != dtype:
                    torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)

    def changed(self, devices: Devices, cache_enabled: bool | None = None) -> AutocastState:
        """This state with other values for ``devices``, and of the cache flag if it is given."""
        cache = self.cache_enabled if cache_enabled is None else cache_enabled
        return AutocastState({**self.devices, **devices}, cache)

    def without_casts(self) -> AutocastState:
        """This state with casts off on every device type."""
        return self.changed({kind: (False, dtype) for kind, (_, dtype) in self.devices.items()})


def states_of(kinds: Iterable[str]) -> Devices:
    """What the calling thread's state says about some device types."""
    # Without Python for each of them, since every forward asks twice.
    enabled, dtypes = map(torch.is_autocast_enabled, kinds), map(torch.get_autocast_dtype, kinds)
    return dict(zip(kinds, zip(enabled, dtypes, strict=True), strict=True))


_CALL = methodcaller("__call__")
_UP_AND_DOWN = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


def nesting() -> int:
    """How many autocast regions the calling thread is in; torch only counts by changing it."""
    _, depth = map(_CALL, _UP_AND_DOWN)  # in C alone, so that no interrupt comes between
    return depth


WEIGHT_CACHE_KEEPS_GRADIENTS: Final = TorchVersion(torch.__version__) >= "2.11"
"""Whether a weight first used under ``no_grad`` still gets gradients in the same region.

Before pytorch/pytorch#165068 autocast's cache hands out the cast that was made under ``no_grad``,
which leads to no gradient.
"""
