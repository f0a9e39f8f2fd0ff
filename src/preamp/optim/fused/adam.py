# SPDX-License-Identifier: BSD-3-Clause
"""FusedAdam: today's, and the one of early 2019 under the same name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from preamp.core.dtypes import is_half
from preamp.kernels.rules import AdamRule, BiasCorrection
from preamp.kernels.stored import Format
from preamp.optim.fused.base import (
    Closure,
    FusedOptimizer,
    Group,
    check_counter,
    evaluate,
    names_scaler,
    rule_of,
)
from preamp.optim.fused.early_adam import EarlyArguments, EarlyOptions
from preamp.optim.fused.entries import batches
from preamp.optim.fused.moments import TWO_MOMENTS


class FusedAdam(FusedOptimizer):
    """Adam and AdamW, for float16, bfloat16, float32 and float64 parameters.

    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g * g``, then with both
    divided by ``1 - beta**step``: ``p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)``. Without
    ``adam_w_mode`` the decay is added to the gradient instead. `torch.optim.AdamW` and
    `torch.optim.Adam` compute the same.

    **Early 2019.** Apex had another optimizer of this name, which BERT scripts use with
    ``FP16_Optimizer``. Any of the keyword-only arguments, or a call ``step(grads=...)``, selects
    its formula: ``p -= size * (m / (sqrt(v) + eps) + weight_decay * p)`` with
    ``size = lr * sqrt(1 - beta2**step) / (1 - beta1**step)`` and uncorrected moments. An
    optimizer keeps the formula of its first step. Positional arguments mean today's.

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

    is_elementwise: ClassVar[bool] = True
    _options: ClassVar[tuple[str, ...]] = (
        *("lr", "bias_correction", "betas", "eps", "weight_decay"),
    )
    _settings: ClassVar[tuple[str, ...]] = (
        *("set_grad_none", "adam_w_mode", "capturable", "master_weights"),
        "_early",
    )
    _wide_state: ClassVar[frozenset[str]] = frozenset({"exp_avg", "exp_avg_sq", "master_param"})
    moments: ClassVar[Mapping[str, Format]] = TWO_MOMENTS

    adam_w_mode: bool
    capturable: bool
    master_weights: bool
    _early: EarlyOptions

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
        early = EarlyOptions(
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
            use_mt=use_mt,
            amp_scale_adjustment=amp_scale_adjustment,
        )
        early.check(**{"adam_w_mode=False": not adam_w_mode, "capturable=True": capturable})
        given = {**locals(), "_early": early, "max_grad_norm": max_grad_norm or 0.0}
        super().__init__(params, given, more=("max_grad_norm",) if early.given else ())

    @property
    def param_groups_master(self) -> list[Group] | None:
        """With ``master_weights`` what is updated, in the form of ``param_groups``."""
        if not self.master_weights:
            return None
        return self._groups_of_copies()

    @functools.cached_property
    def _is_early_kind(self) -> bool:
        return bool(self._early.given)

    # ``grad_scaler`` is not named in the signature: torch's GradScaler warns about optimizers
    # that name it, and hands the same over as attributes otherwise.
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
            grads: Early: gradients in place of the parameters' own: a flat sequence for a single
                group, or one sequence per group.
            output_params: Early: tensors that get the rounded parameters, in the same form.
            scale: Early: gradients are divided by it.
            grad_norms: Early: L2 norm of the scaled gradients of each group; taken here if it is
                needed and not given.
            scaling: ``grad_scaler=scaler`` does what ``scaler.step(optimizer)`` does.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse or of a dtype that is not updated, or an early
                argument is given without ``grads`` to an optimizer of today's formula.
            PreampStateError: Earlier steps followed the other formula.
            ValueError: ``grads``, ``output_params`` or ``grad_norms`` do not match the groups.
        """
        early, has_own_steps = None, self._steps_done(next(iter(self.state), None)) > 0
        if (
            not grads is output_params is scale is grad_norms is None
            or self._is_early_kind
            or has_own_steps
        ):
            early = EarlyArguments(grads, output_params, scale, grad_norms)
        if scaling and names_scaler("FusedAdam", scaling):
            closures = {} if closure is None else {"closure": closure}
            others = {} if early is None else early.given()
            return scaling["grad_scaler"].step(self, **closures, **others)
        if early is None or not early.select_early(
            self.param_groups, is_early_kind=self._is_early_kind, counts_per_parameter=has_own_steps
        ):
            return super().step(closure)
        loss = None if closure is None else evaluate(closure)
        with torch.no_grad():
            self._step_early(early)
        return loss

    def _rule(self, group: Group) -> AdamRule:
        corrected = BiasCorrection.MOMENTS if group["bias_correction"] else BiasCorrection.NONE
        return rule_of(AdamRule, group, bias_correction=corrected, decoupled=self.adam_w_mode)

    def _early_rule(self, group: Group) -> AdamRule:
        corrected = BiasCorrection.STEP_SIZE if group["bias_correction"] else BiasCorrection.NONE
        inside = bool(self._early.eps_inside_sqrt)
        return rule_of(
            AdamRule, group, bias_correction=corrected, decoupled=True, eps_inside_sqrt=inside
        )

    @property
    def _counts_on_device(self) -> bool:
        return self.capturable

    @property
    def _step_supports_amp_scaling(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The early formula counts per parameter on the host, so it must know of a skip."""
        return not self._is_early_kind

    def _step_early(self, early: EarlyArguments) -> None:
        self.check_storage()
        work = early.entries(self.param_groups)
        for entries in work:
            self._check(entries)
        for index, (group, entries) in enumerate(zip(self.param_groups, work, strict=True)):
            if not entries.params:
                continue
            check_counter(group)  # it counts per parameter, on the host
            inv_scale = early.inverse_scale(
                index, entries, group.get("max_grad_norm", 0.0), self._ops
            )
            rule = self._early_rule(group)
            apart = (
                self._steps_of if self.storage.moments != "8bit" else self._apart(self._steps_of)
            )
            for batch in batches(entries, apart):
                step = self._steps_done(batch.params[0]) + 1
                update = batch.update(step=step, inv_scale=inv_scale)
                self._update([self._call(group, batch, rule, update)])
                for param in batch.params:
                    self.state[param]["step"] = step

    def _steps_of(self, params: Sequence[torch.Tensor]) -> list[int]:
        return list(map(self._steps_done, params))

    def _steps_done(self, param: Any) -> int:
        """Of the early formula, which counts per parameter."""
        return int(self.state.get(param, {}).get("step", 0))

    def _has_copy(self, param: torch.Tensor) -> bool:
        return self.master_weights and is_half(param)
