# SPDX-License-Identifier: BSD-3-Clause
"""``amp.init``: function casts and loss scaling without models or optimizers at hand.

Apex's first interface, from 2018. Its casts are the op table's, on the thread that calls ``init``.
New scripts use ``initialize``, which knows the models, and so can cache casts of their weights for
the length of a forward; here a weight is cast at each use, because a cache that outlives the
forward hands out stale values once the weight changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from preamp.casting import (
    device_types_here,
    disable_casts,
    install_function_casts,
    install_wide_where_slow,
    push_thread_casts,
    settle_thread,
)
from preamp.casting.autocast_state import is_casting
from preamp.compat.amp_state import amp_state
from preamp.compat.handle.backward import check_owner, scaled_backward, skip_next_step
from preamp.compat.handle.optim_wrapper import OptimWrapper
from preamp.compat.lists import edits_for
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import bad_state, bad_value, worded
from preamp.core.undo import UndoStack
from preamp.engine.params import first_device
from preamp.scaling import DynamicScale, LossScaler, StaticScale


def _rule(loss_scale: float | str) -> DynamicScale | StaticScale:
    if loss_scale == "dynamic":
        return DynamicScale()
    if isinstance(loss_scale, (int, float)) and math.isfinite(loss_scale) and loss_scale > 0:
        return StaticScale(init_scale=float(loss_scale))
    raise bad_value(
        f"loss_scale={loss_scale!r} is not possible",
        "It is 'dynamic' or a positive number",
        "Leave it out for 'dynamic'",
    )


class AmpHandle:
    """Casts that are on, and a loss scale.

    Made by `init`; on its own it only scales losses.
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        """Remember how to scale; turns no casts on.

        Args:
            loss_scale: ``"dynamic"``, or a positive number.
            enable_caching: Whether `cache` may be used.
            verbose: What `verbose` says.

        Raises:
            ValueError: ``loss_scale`` is neither.
        """
        self._rule = _rule(loss_scale)
        self._scaler: LossScaler | None = None
        self._has_wrapped = False
        self._enable_caching = enable_caching
        self._verbose = verbose
        self._cache: dict[torch.Tensor, torch.Tensor] = {}
        self._undo = UndoStack()
        self._is_on = True

    # -- casts -------------------------------------------------------------------------------

    def cast(self, patch_type: torch.dtype, *, allow_banned: bool) -> None:
        """Turn casts to ``patch_type`` on for this thread until `deactivate`."""
        install_function_casts(
            self._undo,
            allow_banned=allow_banned,
            verbose=self._verbose,
            edits=edits_for(patch_type),
            widens_any_half=True,
        )
        install_wide_where_slow(patch_type, self._undo)
        push_thread_casts(device_types_here(), patch_type, self._undo, widens_any_half=True)

    def take_over(self, stop: Callable[[], None]) -> None:
        """Let `deactivate` end casts that an engine turned on, by calling ``stop``."""
        self._undo.push(stop)

    def is_active(self) -> bool:
        """Whether the handle is on and functions are cast here."""
        return self._is_on and any(is_casting(kind) for kind in device_types_here())

    def _disable_casts(self) -> AbstractContextManager[None]:
        """Return a block without casts; nests, and ends properly on exceptions."""
        return disable_casts()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        """Set ``mod.fn`` to ``func`` when the handle is deactivated; the latest goes first."""
        self._undo.push(lambda: setattr(mod, fn, func))

    def deactivate(self) -> None:
        """Take all casts back, the latest first, and stop scaling; once."""
        settle_thread()
        self._is_on = False
        self._undo.unwind()
        self.clear_cache()

    _deactivate = deactivate  # Apex's name

    # -- losses ------------------------------------------------------------------------------

    def scales_losses(self) -> bool:
        """Whether losses are scaled: until the handle is deactivated."""
        return self._is_on

    def new_scaler(self, device: torch.device) -> LossScaler:
        """Make a scaler with this handle's rule."""
        return LossScaler(self._rule, device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Give ``optimizer`` loss scales of its own, and a ``scale_loss``.

        From then on `scale_loss` of this handle refuses.

        Raises:
            ValueError: ``num_loss`` is not a positive integer.
        """
        wrapper = OptimWrapper(optimizer, self, num_loss)
        self._has_wrapped = True
        return wrapper

    @contextmanager
    def scale_loss(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> Generator[torch.Tensor]:
        """Scale ``loss``; after the block ``optimizer``'s gradients are unscaled.

        Gradients from before are added to. On overflow the next ``optimizer.step()`` does
        nothing. If the body raises, gradients and scale are as before.

        Args:
            loss: Floating tensor; call ``backward`` on what is yielded.
            optimizer: The one whose parameters get gradient.

        Yields:
            ``loss`` in float32 times the scale; ``loss`` itself after `deactivate`.

        Raises:
            PreampStateError: `wrap_optimizer` was called before, ``amp.initialize`` took the
                optimizer over, or it is an ``FP16_Optimizer``.
            TypeError: ``loss`` is not a floating-point tensor, or ``optimizer`` no optimizer.

        Mutates:
            Gradients and the scale, and on overflow ``optimizer.step`` for one call.
            Synchronises at the end of the block.
        """
        if not self._is_on:
            yield loss
            return
        if self._has_wrapped:
            raise bad_state(
                "handle.scale_loss() after handle.wrap_optimizer()",
                "A wrapped optimizer scales its own losses, with scales of their own",
                "Use `with optimizer.scale_loss(loss) as scaled_loss` on what "
                "wrap_optimizer returned, and wrap every optimizer",
            )
        check_owner(optimizer)
        if self._scaler is None:
            self._scaler = self.new_scaler(first_device((), (optimizer,)))
        with scaled_backward(loss, optimizer, self._scaler) as (scaled, overflowed):
            yield scaled
        if overflowed():
            skip_next_step(optimizer)
        self.clear_cache()

    # -- the cache ---------------------------------------------------------------------------

    @property
    def has_cache(self) -> bool:
        """Whether casts may be kept in `cache`."""
        return self._enable_caching

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """A place for casts, by parameter; preamp puts none there itself."""
        return self._cache

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cached cast of ``param``, if there is one."""
        self._cache.pop(param, None)

    def clear_cache(self) -> None:
        """Forget all cached casts."""
        self._cache.clear()

    _clear_cache = clear_cache  # Apex's name

    @property
    def verbose(self) -> bool:
        """Whether casts are printed."""
        return self._verbose


class NoOpHandle:
    """The handle of ``init(enabled=False)``: the same methods, without effect."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        """Return False."""
        return False

    def scales_losses(self) -> bool:
        """Return False."""
        return False

    def new_scaler(self, device: torch.device) -> LossScaler:
        """Make the null object of scalers."""
        return LossScaler(StaticScale(), device)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` so that ``scale_loss`` exists; losses pass through unchanged."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[torch.Tensor]:
        """Yield ``loss`` itself."""
        return nullcontext(loss)

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """A new empty dict."""
        return {}

    def remove_cache(self, param: torch.Tensor) -> None:
        """Do nothing."""

    def clear_cache(self) -> None:
        """Do nothing."""

    _clear_cache = clear_cache

    def _disable_casts(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _save_func(self, mod: Any, fn: str, func: Any) -> None:
        pass

    def deactivate(self) -> None:
        """Do nothing."""

    _deactivate = deactivate


class _Current:
    """The latest handle: what ``init`` is called for again, it replaces."""

    handle: AmpHandle | None = None


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Turn function casts on for this thread, as ``opt_level="O1"`` does, with nothing else.

    An earlier handle is deactivated first.

    Args:
        enabled: False turns nothing on and returns a `NoOpHandle`.
        loss_scale: ``"dynamic"`` (from 2**16 up to 2**24), or a positive number.
        enable_caching: Whether ``handle.cache`` may be used; casts are the same either way.
        verbose: Print every cast.
        allow_banned: Cast the arguments of banned functions (``binary_cross_entropy``) to float32
            instead of refusing half ones.
        patch_type: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        The handle; ``handle.scale_loss(loss, optimizer)`` goes around ``backward``.

    Raises:
        RuntimeError: ``patch_type`` is another dtype.
        ValueError: ``loss_scale`` is neither ``"dynamic"`` nor a positive number.

    Mutates:
        Functions of torch and the thread's autocast state, until ``handle.deactivate()``, which
        Apex called ``_deactivate``; ``_amp_state.handle``.
    """
    if patch_type not in HALF_DTYPES:
        raise worded(
            RuntimeError,
            f"patch_type={patch_type!r} is not possible",
            "Casts go to torch.float16 or torch.bfloat16",
            "Leave it out for torch.float16",
        )
    handle = AmpHandle(loss_scale, enable_caching, verbose) if enabled else NoOpHandle()
    if _Current.handle is not None:
        _Current.handle.deactivate()
        _Current.handle = None
    if isinstance(handle, AmpHandle):
        handle.cast(patch_type, allow_banned=allow_banned)
        _Current.handle = amp_state.handle = handle
    return handle
