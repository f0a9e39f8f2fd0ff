# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.scaler.LossScaler``: Apex's names over a `preamp.scaling.LossScaler`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from preamp.kernels import backend
from preamp.scaling import DynamicScale, ScaleRule, StaticScale
from preamp.scaling import LossScaler as CoreScaler

Grads = Sequence[torch.Tensor | None]


class LossScaler:
    """Dynamic or static loss scaling under Apex's names.

    The underscored attributes are read and written by scripts, so they are part of the contract:
    ``_loss_scale`` sets the scale, ``_unskipped`` the clean updates in a row, ``_scale_seq_len``
    how many of them double the scale. Reading any of them synchronises with the device.

    Attributes:
        core: The scaler that this one shows.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        """Make a scaler of its own, tied to no engine.

        Args:
            loss_scale: ``"dynamic"`` or a number.
            init_scale: First dynamic scale.
            scale_factor: Growth on success and, inverted, backoff on overflow.
            scale_window: Clean updates in a row before the scale grows.
            min_loss_scale: Floor; falsy for none.
            max_loss_scale: Ceiling.
        """
        rule: ScaleRule
        if loss_scale == "dynamic":
            rule = DynamicScale(
                init_scale=init_scale,
                growth_factor=scale_factor,
                backoff_factor=1.0 / scale_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale or None,
                max_scale=max_loss_scale,
            )
        else:
            rule = StaticScale(init_scale=float(loss_scale))
        self._show(CoreScaler(rule))

    def _show(self, core: CoreScaler) -> None:
        self.core = core
        self._buffer: torch.Tensor | None = None

    @classmethod
    def of(cls, core: CoreScaler) -> LossScaler:
        """Return Apex's face of an engine's scaler; both show the same state."""
        face = cls.__new__(cls)
        face._show(core)  # noqa: SLF001
        return face

    # -- state under Apex's names --------------------------------------------------------------

    def loss_scale(self) -> float:
        """Return the current scale."""
        return self.core.value()

    @property
    def dynamic(self) -> bool:
        """Whether the scale reacts to overflows."""
        return self.core.is_dynamic

    @property
    def _loss_scale(self) -> float:
        return self.core.value()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.core.set_scale(float(value))

    @property
    def _unskipped(self) -> int:
        return int(self.core.growth_tracker.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.core.set_clean_steps(int(value))

    @property
    def _scale_seq_len(self) -> int:
        rule = self.core.rule
        return rule.growth_interval if isinstance(rule, DynamicScale) else 2000

    @_scale_seq_len.setter
    def _scale_seq_len(self, value: int) -> None:
        if isinstance(self.core.rule, DynamicScale):
            self.core.rule = dataclasses.replace(self.core.rule, growth_interval=int(value))

    @property
    def _min_loss_scale(self) -> float | None:
        rule = self.core.rule
        return rule.min_scale if isinstance(rule, DynamicScale) else None

    @property
    def _max_loss_scale(self) -> float:
        rule = self.core.rule
        return rule.max_scale if isinstance(rule, DynamicScale) else 2.0**24

    @property
    def _has_overflow(self) -> bool:
        return bool(self.core.found_inf.item() != 0)

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self.core.record(torch.tensor(float(value), device=self.core.device), forgets=True)

    @property
    def _overflow_buf(self) -> torch.Tensor:
        """int32, shape ``(1,)``; kernels that take a flag may write to it, scripts reduce it."""
        if self._buffer is None:
            self._buffer = self.core.found_inf.to(torch.int32).reshape(1)
        return self._buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: torch.Tensor) -> None:
        self._buffer = value

    # -- Apex's methods ------------------------------------------------------------------------

    def clear_overflow_state(self) -> None:
        """Forget an overflow that was found but not acted on."""
        self.core.found_inf.zero_()
        self._buffer = None

    def unscale(
        self,
        model_grads: Grads,
        master_grads: Grads,
        unused_scale: float,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write ``master = model / scale`` and remember an overflow in the model gradients.

        Args:
            model_grads: Scaled gradients; not mutated unless they are the masters.
            master_grads: Receive the result.
            unused_scale: Ignored, as in Apex.
            models_are_masters: Whether both lists hold the same tensors.
            scale_override: Scale to use instead of the current one.
        """
        scale = self.core.value() if scale_override is None else scale_override
        self._combine(model_grads, [None] * len(model_grads), master_grads, 1.0 / scale, 0.0)

    def unscale_with_stashed(
        self,
        model_grads: Grads,
        stashed_master_grads: Grads,
        master_grads: Grads,
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write ``master = model * (out/have) + stashed * (out/stashed_have)``.

        Args:
            model_grads: Scaled gradients, checked for overflow.
            stashed_master_grads: Earlier gradients.
            master_grads: Receive the result.
            scale_override: ``(have, stashed_have, out)``; by default the current scale, 1 and 1.
        """
        have, stashed_have, out = scale_override or (self.core.value(), 1.0, 1.0)
        factors = (out / have, out / stashed_have)
        self._combine(model_grads, stashed_master_grads, master_grads, *factors)

    def _combine(
        self, models: Grads, stashed: Grads, masters: Grads, factor: float, stashed_factor: float
    ) -> None:
        trios = [
            (model, old, master)
            for model, old, master in zip(models, stashed, masters, strict=True)
            if model is not None and master is not None
        ]
        with torch.no_grad():
            if self.core.is_dynamic and trios:
                census = backend().census([model for model, _, _ in trios], self.core.device)
                self.core.record(census.found_inf)
            for model, old, master in trios:
                wide = model.to(torch.promote_types(torch.float32, model.dtype)) * factor
                master.copy_(wide if old is None else wide + old.to(wide.dtype) * stashed_factor)

    def update_scale(self) -> bool:
        """Adjust the scale to what was found. Synchronises.

        Returns:
            Whether the step should be skipped.
        """
        if self._buffer is not None:
            self.core.record((self._buffer.reshape(-1)[0] != 0).to(torch.float32))
            self._buffer = None
        return bool(self.core.update().item() != 0)
