# SPDX-License-Identifier: BSD-3-Clause
"""torch's own thread-local autocast state: read, saved, set back.

This state is the only thing that says "casts are active here". Nothing in this file remembers
anything between calls except which device types may have an autocast state at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from preamp.core.torch_private.scripting import not_compiled_alone

P = ParamSpec("P")
R = TypeVar("R")

# ``torch.is_autocast_enabled`` raises for a device type without an autocast back end ("meta"), so
# the types that may be asked are listed; a third-party back end joins when an engine names it.
_device_types: set[str] = {"cpu", "cuda", "xpu", "mps", "hpu", "xla"}


def know_device_types(device_types: Iterable[str]) -> None:
    """Let the casts act on further device types (those of third-party back ends)."""
    _device_types.update(filter(torch.amp.is_autocast_available, device_types))


def is_casting(device_type: str) -> bool:
    """Whether casts are active on this thread for tensors of ``device_type``."""
    return device_type in _device_types and torch.is_autocast_enabled(device_type)


def is_any_casting() -> bool:
    """Whether casts are active on this thread for tensors of any device type."""
    return any(map(torch.is_autocast_enabled, _device_types))


def casting_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Device type of the first floating argument on which casts are active; none with ``out=``."""
    for arg in args:
        found = _casting_device_of(arg)
        if found is not None:
            return None if kwargs.get("out") is not None else found
    for arg in kwargs.values():
        found = _casting_device_of(arg)
        if found is not None:
            return None if kwargs.get("out") is not None else found
    return None


def _casting_device_of(arg: Any) -> str | None:
    if isinstance(arg, torch.Tensor):
        if arg.is_floating_point():
            device_type = arg.device.type
            return device_type if is_casting(device_type) else None
    elif isinstance(arg, (list, tuple)):
        for item in cast("Sequence[Any]", arg):
            found = _casting_device_of(item)
            if found is not None:
                return found
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


@dataclass(frozen=True, slots=True)
class AutocastState:
    """One thread's autocast state: ``{device type: (enabled, dtype)}`` and the cache flag."""

    devices: Mapping[str, tuple[bool, torch.dtype]]
    cache_enabled: bool

    @staticmethod
    def capture() -> AutocastState:
        """Read the calling thread's state."""
        return AutocastState(_states_of(_device_types), torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Make the calling thread's state this one (the nesting count is not part of it)."""
        now = _states_of(self.devices)
        if now != self.devices:
            for kind, (enabled, dtype) in self.devices.items():
                if now[kind][0] != enabled:
                    torch.set_autocast_enabled(kind, enabled)
                if now[kind][1] != dtype:
                    torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)

    def casting(
        self, device_types: Iterable[str], dtype: torch.dtype, *, cache_enabled: bool
    ) -> AutocastState:
        """This state with casts to ``dtype`` on for ``device_types``."""
        changed = {kind: (True, dtype) for kind in device_types}
        return AutocastState({**self.devices, **changed}, cache_enabled)

    def taking(self, other: AutocastState, device_types: Iterable[str]) -> AutocastState:
        """This state with what ``other`` says about ``device_types`` and the cache."""
        changed = {kind: other.devices[kind] for kind in device_types}
        return AutocastState({**self.devices, **changed}, other.cache_enabled)

    def is_ours(
        self, set_last: AutocastState, wanted: AutocastState, device_types: Iterable[str]
    ) -> bool:
        """Whether ``device_types`` are as they were set last, or on or off as wanted already."""
        return all(
            self.devices[kind] == set_last.devices[kind]
            or self.devices[kind][0] == wanted.devices[kind][0]
            for kind in device_types
        )

    def without_casts(self) -> AutocastState:
        """This state with casts off on every device type."""
        off = {kind: (False, dtype) for kind, (_, dtype) in self.devices.items()}
        return AutocastState(off, self.cache_enabled)


def _states_of(kinds: Iterable[str]) -> dict[str, tuple[bool, torch.dtype]]:
    """By device type whether casts are on, and to what."""
    # Without Python for each of them, since every forward asks twice.
    enabled, dtypes = map(torch.is_autocast_enabled, kinds), map(torch.get_autocast_dtype, kinds)
    return dict(zip(kinds, zip(enabled, dtypes, strict=True), strict=True))


_CALL = methodcaller("__call__")
_UP_AND_DOWN = (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)


def nesting() -> int:
    """How many autocast regions the calling thread is in; torch only counts by changing it."""
    _, depth = map(_CALL, _UP_AND_DOWN)  # in C alone, so that no interrupt comes between
    return depth


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def weight_cache_keeps_gradients() -> bool:
    """Whether a weight first used under ``no_grad`` still gets gradients in the same region.

    Until pytorch/pytorch#165068 (in 2.6, for one) autocast's cache hands out the cast that was
    made under ``no_grad``, which leads to no gradient. Found by trying, once per process; a
    checkpoint that counts what the first forward saves must not see that.
    """
    with (
        saved_tensors_hooks(_unchanged, _unchanged),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=True),
    ):
        weight = torch.ones(1, 1, device="cpu", requires_grad=True)
        with torch.no_grad():
            torch.ops.aten.mm(weight, weight)
        return torch.ops.aten.mm(weight, weight).requires_grad
