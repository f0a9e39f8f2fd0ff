# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam: today's, and the one of early 2019 under the same name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from preamp.core.dtypes import is_half, math_dtype
from preamp.core.errors import bad_state, bad_value
from preamp.core.splits import Splits
from preamp.kernels.rules import AdamRule, BiasCorrection
from preamp.optim.fused.base import (
    Closure,
    FusedOptimizer,
    Group,
    Signals,
    Work,
    check_counter,
    rule_of,
)
from preamp.optim.fused.checks import refusal
from preamp.optim.fused.entries import Entries, Entry, batches
from preamp.optim.fused.moments import TWO_MOMENTS
from preamp.optim.fused.norms import global_norm

_EARLY = ("eps_inside_sqrt", "max_grad_norm", "use_mt", "amp_scale_adjustment")
"""Keywords of the constructor in early 2019."""

_CLIP_EPS = 1e-6
"""Added to a norm before it is divided by the largest one allowed."""


class FusedAdam(FusedOptimizer):
    """Adam and AdamW, for float16, bfloat16, float32 and float64 parameters.

    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g * g``, then with both
    divided by ``1 - beta**step``: ``p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)``. Without
    ``adam_w_mode`` the decay is added to the gradient instead. `torch.optim.AdamW` and
    `torch.optim.Adam` compute the same.

    **Early 2019.** Apex had another optimizer of this name, which BERT scripts use with
    ``FP16_Optimizer``. Any of the keyword-only arguments selects its formula, and so does that
    wrapper: ``p -= size * (m / (sqrt(v) + eps) + weight_decay * p)`` with
    ``size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)`` and uncorrected moments. Positional
    arguments mean today's.

    State: ``exp_avg`` and ``exp_avg_sq`` in float32 whatever the parameter's dtype (float64 for
    float64), and ``master_param`` with ``master_weights``. The step counter is ``group["step"]``;
    the early formula counts per parameter, in the state. Does not synchronise.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Correct the moments for the number of steps.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        adam_w_mode: Decay the parameter rather than add the decay to the gradient.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.
        capturable: Keep ``lr`` and ``group["step"]`` as tensors on the device, for CUDA graphs.
        master_weights: Update float32 copies of half parameters and round them into these; needs
            ``capturable``. Not needed with `preamp.initialize`, which keeps masters itself.
        eps_inside_sqrt: Early: divide by ``sqrt(v + eps)``.
        max_grad_norm: Early: clip each group's gradients to this norm; 0 for no clipping.
        use_mt: Early: has no effect; it chose between kernels of equal results.
        amp_scale_adjustment: Early: must be 1.

    Raises:
        RuntimeError: ``amsgrad`` is set, or ``master_weights`` without ``capturable``.
        ValueError: A negative number, betas that are not in [0, 1), or early arguments together
            with today's.
    """

    is_elementwise = True
    _options = ("lr", "bias_correction", "betas", "eps", "weight_decay")
    _settings = (
        *("set_grad_none", "adam_w_mode", "capturable", "master_weights"),
        *("is_early", "_eps_inside_sqrt"),
    )
    _wide_state = frozenset({"exp_avg", "exp_avg_sq", "master_param"})
    moments = TWO_MOMENTS

    adam_w_mode: bool
    capturable: bool
    master_weights: bool
    is_early: bool
    """Whether the formula is that of early 2019."""
    _eps_inside_sqrt: bool

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        eps_inside_sqrt: bool | None = None,
        max_grad_norm: float | None = None,
        use_mt: bool | None = None,
        amp_scale_adjustment: float | None = None,
    ) -> None:
        named = {name: value for name, value in locals().items() if name in _EARLY}
        early = [name for name, value in named.items() if value is not None]
        given = {**locals(), "is_early": False, "_eps_inside_sqrt": bool(eps_inside_sqrt)}
        given["max_grad_norm"] = max_grad_norm or 0.0
        super().__init__(params, given, more=("max_grad_norm",) if early else ())
        if amp_scale_adjustment not in (None, 1.0):
            raise bad_value(
                f"FusedAdam got amp_scale_adjustment={amp_scale_adjustment!r}",
                "Gradients reach the optimizer unscaled, so only 1.0 has a meaning",
                "Leave it out, and scale the loss instead",
            )
        if early:
            self.follow_early_formula(", ".join(early))

    def follow_early_formula(self, why: str) -> None:
        """Update as in early 2019 from the first step on; ``why`` is what asks for it.

        Raises ``ValueError`` where options are set that this formula lacks.
        """
        todays = {"adam_w_mode=False": not self.adam_w_mode, "capturable=True": self.capturable}
        clashing = " and ".join(name for name, is_set in todays.items() if is_set)
        if clashing:
            raise bad_value(
                f"FusedAdam got {why} of early 2019 together with {clashing}",
                "That optimizer decays the parameter, on the host's step count, and has no "
                "masters of its own",
                f"Leave out {clashing}, or clip with preamp.clip_grad_norm_ and use today's "
                "formula",
            )
        self.is_early = True

    @property
    def param_groups_master(self) -> list[Group] | None:
        """Refused: raises an `AttributeError`, so `hasattr` says that it is not there."""
        raise AttributeError(
            "FusedAdam has no param_groups_master. Its float32 copies lie beside the moments. "
            "Read optimizer.state[param]['master_param'], which a step with master_weights makes."
        )

    def step(
        self,
        closure: Closure | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | torch.Tensor | None = None,
        grad_norms: Sequence[float | torch.Tensor] | None = None,
        **scaling: Any,
    ) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Re-evaluates the model with gradients enabled and returns the loss.
            grads: Refused, as in Apex since August 2019, and so are the next three.
            output_params: See ``grads``.
            scale: See ``grads``.
            grad_norms: See ``grads``.
            scaling: ``grad_scaler=scaler`` does what ``scaler.step(optimizer)`` does.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse or of a dtype that is not updated, or an argument of
                early 2019 is given.
        """
        if not grads is output_params is scale is grad_norms is None:
            early = {"grads": grads, "output_params": output_params}
            early |= {"scale": scale, "grad_norms": grad_norms}
            names = [name for name, value in early.items() if value is not None]
            raise refusal(
                f"FusedAdam.step() got {', '.join(names)}",
                "It takes gradients from its parameters, unscaled",
                "Leave them out, with the backward in preamp.scale_loss, or wrap the optimizer in "
                "preamp.optimizers.FP16_Optimizer",
            )
        return super().step(closure, **scaling)

    def _rule(self, group: Group) -> AdamRule:
        corrected = BiasCorrection.STEP_SIZE if self.is_early else BiasCorrection.MOMENTS
        if not group["bias_correction"]:
            corrected = BiasCorrection.NONE
        return rule_of(
            AdamRule,
            group,
            bias_correction=corrected,
            decoupled=self.adam_w_mode,
            eps_inside_sqrt=self._eps_inside_sqrt,
        )

    @property
    def _counts_on_device(self) -> bool:
        return self.capturable

    @property
    def _step_supports_amp_scaling(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The early formula counts per parameter on the host, so it must know of a skip."""
        return not self.is_early

    def _take_step(self, work: Work, signals: Signals) -> None:
        if not self.is_early:
            super()._take_step(work, signals)
            return
        apart = self._steps_of if self.storage.moments != "8bit" else self._apart(self._steps_of)
        for group, entries in work:
            if not entries.params:
                continue
            check_counter(group)  # it counts per parameter, on the host
            clip = self._early_clip(entries, group.get("max_grad_norm", 0.0))
            rule = self._rule(group)
            for batch in batches(entries, apart):
                step = self._steps_done(batch.params[0]) + 1
                update = batch.update(step=step, inv_scale=clip)
                self._update([self._call(group, batch, rule, update)])
                for param in batch.params:
                    self.state[param]["step"] = step

    def _early_clip(self, entries: Entries, max_norm: float) -> torch.Tensor | None:
        """What clips a group, by itself: ``1 / max(1, (norm + 1e-6) / max_norm)``.

        A norm that is nan clips nothing: the other elements are none the worse for it.
        """
        if max_norm <= 0:
            return None
        norm = global_norm([entries], self._ops, Splits())
        norm = norm.to(math_dtype(entries.params[0].dtype))
        over = (norm + _CLIP_EPS) / max_norm
        return torch.where(over > 1.0, over, 1.0).reciprocal()

    def _steps_of(self, params: Sequence[torch.Tensor]) -> list[int]:
        return list(map(self._steps_done, params))

    def _steps_done(self, param: Any) -> int:
        """Of the early formula, which counts per parameter."""
        return int(self.state.get(param, {}).get("step", 0))

    def _has_copy(self, param: torch.Tensor) -> bool:
        return self.master_weights and is_half(param)

    def _own_state(
        self, given: Mapping[str, Any]
    ) -> tuple[dict[torch.Tensor, Entry], dict[Any, Any]]:
        entries: dict[Any, Entry] = given["state"]
        per_parameter = any(int(entry.get("step", 0)) > 0 for entry in entries.values())
        per_group = any("step" in group for group in given["param_groups"])
        if per_group if self.is_early else per_parameter:
            here, there = ("early 2019", "today") if self.is_early else ("today", "early 2019")
            raise bad_state(
                f"FusedAdam of {here} got a state with the step counters of that of {there}",
                "Today's counts steps in the group, that of early 2019, like torch.optim.Adam, for "
                "each parameter; nothing was loaded",
                "Load a file into the optimizer that wrote it",
            )
        return super()._own_state(given)
