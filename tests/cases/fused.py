# SPDX-License-Identifier: BSD-3-Clause
"""The fused optimizers' formulas in float64, and one row per option worth crossing with dtypes.

An oracle computes in float64 and rounds what it stores, parameters and state, to the dtype that
the optimizer stores it in; nothing else of the optimizer's precision is in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases.exact import Exact
from cases.rules import ORACLES
from preamp import optimizers
from preamp.kernels.rules import BiasCorrection

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)

Options = Mapping[str, Any]
State = dict[str, torch.Tensor]
Rule = Callable[[Options, int, torch.Tensor, torch.Tensor, State], torch.Tensor]
"""Takes options, step, parameter, gradient and state; changes the state, returns the parameter."""


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def corrections(o: Options, t: int) -> tuple[float, float]:
    if not o["bias_correction"]:
        return 1.0, 1.0
    return 1 - o["betas"][0] ** t, 1 - o["betas"][1] ** t


def by(op: str, o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    """By the formula of an op, with options under the names of its rule."""
    keys = STATE[op]
    beta1, beta2 = o.get("betas", (0.0, 0.0))
    rule = SimpleNamespace(**o, beta1=beta1, beta2=beta2)
    state = [Exact.of(s.get(key, torch.zeros_like(p))) for key in keys]
    param, *state = ORACLES[op](rule, t, Exact.of(p), Exact.of(g), *state)
    s.update(zip(keys, [value.value for value in state], strict=True))
    return param.value


MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = {
    **dict.fromkeys(("adam_", "lamb_", "novograd_"), MOMENTS),
    **dict.fromkeys(("sgd_", "lars_"), ("momentum_buffer",)),
    "adagrad_": ("sum",),
}
"""What optimizers call the state of an op."""


def adam(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    kind = BiasCorrection.MOMENTS if o["bias_correction"] else BiasCorrection.NONE
    said = {"decoupled": o["adam_w_mode"], "bias_correction": kind, "eps_inside_sqrt": False}
    return by("adam_", {**o, **said}, t, p, g, s)


def early_adam(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    if o["max_grad_norm"] > 0:
        g = g / max(1.0, (o["norm"] + 1e-6) / o["max_grad_norm"])
    kind = BiasCorrection.STEP_SIZE if o["bias_correction"] else BiasCorrection.NONE
    return by("adam_", {**o, "decoupled": True, "bias_correction": kind}, t, p, g, s)


def lamb(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    if o["max_grad_norm"] > 0 and o["norm"] > o["max_grad_norm"]:
        g = g / (o["norm"] / o["max_grad_norm"])
    is_scaled = o["use_nvlamb"] or o["weight_decay"] != 0
    said = {"decoupled": o["adam_w_mode"], "uses_trust_ratio": is_scaled}
    return by("lamb_", {**o, **said}, t, p, g, s)


def sgd(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    del t  # a parameter's first step is its own
    said = {"decays_after_momentum": o["wd_after_momentum"]}
    return by("sgd_", {**o, **said}, 2 if s else 1, p, g, s)


def novograd(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    none_yet = torch.tensor(0.0 if o["init_zero"] else -1.0)
    s.setdefault("exp_avg_sq", none_yet)
    said = {"decays_inside_moment": o["reg_inside_moment"], "uses_max_norm": o["norm_type"] == 0}
    return by("novograd_", {**o, **said}, t, p, g, s)


def adagrad(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    return by("adagrad_", {**o, "decoupled": o["adagrad_w_mode"]}, t, p, g, s)


def lars(o: Options, t: int, p: torch.Tensor, g: torch.Tensor, s: State) -> torch.Tensor:
    return by("lars_", {**o, "uses_trust_ratio": not o["is_skipped"]}, t, p, g, s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCase:
    """One optimizer class.

    Attributes:
        kind: The class.
        rule: Its formula.
        defaults: The defaults of its constructor, written down from Apex's documentation.
        needs: Arguments without a default.
        wide: State keys that are float32 for half parameters.
        norm: Of which gradients ``norm`` is taken: none, all, or those of the group.
        variants: Options worth a test each.
    """

    kind: Any
    rule: Rule
    defaults: Options
    needs: Options = field(default_factory=dict)
    wide: frozenset[str] = frozenset()
    norm: str = ""
    variants: Sequence[Options] = ({},)

    @property
    def name(self) -> str:
        return self.kind.__name__


_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
_LAMB = _ADAM | {"eps": 1e-6, "weight_decay": 0.01, "adam_w_mode": True}
_LAMB = _LAMB | {"grad_averaging": True, "max_grad_norm": 1.0, "use_nvlamb": False}
_SGD = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
_LAMB_VARIANTS = (
    {},
    {"adam_w_mode": False, "weight_decay": 0.1},
    {"grad_averaging": False, "bias_correction": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "use_nvlamb": True},
    {"max_grad_norm": 0, "betas": (0.5, 0.75)},
    {"max_grad_norm": 100.0, "lr": 0.1, "eps": 0.01},
)

ADAM = FusedCase(
    kind=optimizers.FusedAdam,
    rule=adam,
    defaults=_ADAM | {"adam_w_mode": True, "weight_decay": 0.0},
    wide=frozenset({"exp_avg", "exp_avg_sq"}),
    variants=(
        {},
        {"weight_decay": 0.1, "lr": 0.05},
        {"weight_decay": 0.1, "adam_w_mode": False},
        {"bias_correction": False, "betas": (0.8, 0.9), "eps": 1e-3},
        {"betas": (0.0, 0.5)},
        {"capturable": True, "weight_decay": 0.1},
    ),
)
EARLY_ADAM = FusedCase(
    kind=optimizers.FusedAdam,
    rule=early_adam,
    defaults=_ADAM | {"eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0},
    wide=frozenset({"exp_avg", "exp_avg_sq"}),
    norm="group",
    variants=(
        {"use_mt": False},
        {"max_grad_norm": 0.0, "weight_decay": 0.1},
        {"max_grad_norm": 1.0, "bias_correction": False},
        {"max_grad_norm": 100.0, "eps": 0.01},
        {"eps_inside_sqrt": True, "eps": 0.01},
    ),
)
LAMB = FusedCase(
    kind=optimizers.FusedLAMB, rule=lamb, defaults=_LAMB, norm="all", variants=_LAMB_VARIANTS
)
MIXED_LAMB = FusedCase(
    kind=optimizers.FusedMixedPrecisionLamb,
    rule=lamb,
    defaults=_LAMB,
    wide=frozenset({"exp_avg", "exp_avg_sq"}),
    norm="all",
    variants=_LAMB_VARIANTS,
)
SGD = FusedCase(
    kind=optimizers.FusedSGD,
    rule=sgd,
    defaults=_SGD | {"dampening": 0.0, "wd_after_momentum": False},
    needs={"lr": 0.1},
    variants=(
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "wd_after_momentum": True, "weight_decay": 0.1},
        {"momentum": 0.5, "materialize_master_grads": False},
    ),
)
NOVOGRAD = FusedCase(
    kind=optimizers.FusedNovoGrad,
    rule=novograd,
    defaults=_ADAM
    | {"weight_decay": 0.0, "reg_inside_moment": False, "grad_averaging": True}
    | {"norm_type": 2, "init_zero": False},
    wide=frozenset({"exp_avg_sq"}),
    variants=(
        {},
        {"weight_decay": 0.1, "betas": (0.95, 0.5)},
        {"weight_decay": 0.1, "reg_inside_moment": True},
        {"reg_inside_moment": True, "grad_averaging": False, "bias_correction": False},
        {"norm_type": 0, "betas": (0.9, 0.5)},
        {"norm_type": 0, "init_zero": True},
        {"init_zero": True, "bias_correction": False, "eps": 0.1},
    ),
)
ADAGRAD = FusedCase(
    kind=optimizers.FusedAdagrad,
    rule=adagrad,
    defaults={"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": False},
    variants=(
        {},
        {"weight_decay": 0.1, "lr": 0.1},
        {"weight_decay": 0.1, "adagrad_w_mode": True, "eps": 0.01},
    ),
)
LARS = FusedCase(
    kind=optimizers.FusedLARS,
    rule=lars,
    defaults=_SGD | {"trust_coefficient": 0.001, "eps": 0.0, "is_skipped": False},
    needs={"lr": 0.1},
    variants=(
        {"lr": 8.0},
        {"momentum": 0.9, "weight_decay": 0.1, "trust_coefficient": 0.1},
        {"momentum": 0.9, "nesterov": True, "eps": 0.1, "trust_coefficient": 0.1},
    ),
)
FUSED = (ADAM, EARLY_ADAM, LAMB, MIXED_LAMB, SGD, NOVOGRAD, ADAGRAD, LARS)
VARIANTS = [(case, variant) for case in FUSED for variant in case.variants]


def variant_id(value: Any) -> str | None:
    """Test ids for rows, options and dtypes."""
    if isinstance(value, FusedCase):
        return "early" if value is EARLY_ADAM else value.name
    if isinstance(value, Mapping):
        return "-".join(f"{k}={v}" for k, v in value.items()) or "defaults"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


VISIBLE = {"lr": 0.125}  # one step is more than a rounding, in bfloat16 too
KINDS: list[tuple[FusedCase, Options]] = [
    *((case, {**case.variants[-1], **VISIBLE}) for case in FUSED),
    (ADAM, VISIBLE),
    (ADAM, {"capturable": True, "master_weights": True, **VISIBLE}),
    (MIXED_LAMB, {"reduced_precision_dtype": torch.float16, **VISIBLE}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, **VISIBLE}),
    (NOVOGRAD, {"lr": 1.0}),
]
every_kind = pytest.mark.parametrize(("case", "options"), KINDS, ids=variant_id)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=variant_id)


class Oracle:
    """Trains copies of parameters by a row's formula.

    Attributes:
        values: The parameters, float64, rounded to their dtype.
        state: The state of each, likewise.
        options: The options of each group; may be changed between steps.
    """

    def __init__(
        self,
        case: FusedCase,
        groups: Sequence[tuple[Sequence[torch.Tensor], Options]],
        options: Options,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
    ) -> None:
        """Start where the parameters are.

        Args:
            case: The row.
            groups: Parameters, and options that differ from the others.
            options: Options for all.
            dtype: Parameters' dtype.
            stored: What the formula's result is rounded to, if not ``dtype``.
        """
        self._case = case
        self._dtype = stored or dtype
        self._state_dtype = dtype
        self._groups = [len(params) for params, _ in groups]
        base = {**case.defaults, **case.needs, **options}
        self.options = [{**base, **own} for _, own in groups]
        self.values = [p.detach().double().clone() for params, _ in groups for p in params]
        self.state: list[State] = [{} for _ in self.values]
        self._steps = [0] * len(groups)
        self._counts = [0] * len(self.values)

    def step(self, grads: Sequence[torch.Tensor | None]) -> None:
        start = 0
        everything = _norm(grads)
        for group, size in enumerate(self._groups):
            self._steps[group] += 1
            own = slice(start, start + size)
            norm = everything if self._case.norm == "all" else _norm(grads[own])
            for index in range(start, start + size):
                grad = grads[index]
                if grad is not None:
                    self._counts[index] += 1
                    is_early = self._case.rule is early_adam
                    t = self._counts[index] if is_early else self._steps[group]
                    self._update(index, {**self.options[group], "norm": norm}, t, grad.double())
            start += size

    def _update(self, index: int, options: Options, t: int, grad: torch.Tensor) -> None:
        state = self.state[index]
        value = self._case.rule(options, t, self.values[index], grad, state)
        self.values[index] = value.to(self._dtype).double()
        for key in state:
            dtype = wide(self._state_dtype) if key in self._case.wide else self._state_dtype
            state[key] = state[key].to(dtype).double()


def _norm(grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
    squares = [grad.double().square().sum() for grad in grads if grad is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def gradients(
    shapes: Sequence[tuple[int, ...]], step: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Gradients of one step, none close to zero, so that no square of one underflows."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for shape in shapes:
        noise = torch.randn(shape, generator=generator)
        found.append((noise + noise.sign() * 0.5).to(dtype))
    return found


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of magnitude one."""
    generator = torch.Generator().manual_seed(99)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


BUDGET = {
    torch.float64: 2.0**-46,
    torch.float32: 2.0**-20,
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
}
"""What a few steps may add up to, relative to the largest value: two roundings of the dtype."""


def assert_close(
    ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, where: str, least: float = 1.0
) -> None:
    """Within the budget of ``dtype``; the dtype of ``ours`` is the test's business.

    ``least`` is the magnitude of what was summed, where the sum itself may cancel.
    """
    if exact.numel():
        error = (ours.detach().double() - exact).abs().max()
        allowed = BUDGET[dtype] * exact.abs().max().clamp(min=least)
        assert error <= allowed, f"{where}: off by {error} where {allowed} is allowed"
