# SPDX-License-Identifier: BSD-3-Clause
"""``clip_grad_norm_``: gradients are measured, and factors take the rest of the way.

``clip_grad_value_`` changes values, so gradients of masters are made for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from preamp.core.errors import bad_state, bad_type, with_article
from preamp.core.splits import Splits
from preamp.core.tensors import dtype_of, has_sharded, host_reaches, kinds_of, with_gradients
from preamp.engine.engine import Engine, engines_in_use
from preamp.engine.lookup import bare, engine_of, find_engine
from preamp.engine.session import OptimizerSession
from preamp.kernels import Ops
from preamp.optim import HalfGradients, leaves_of
from preamp.optim.rank_norms import total_norm

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip unscaled gradients, as one vector: those of an optimizer, or of parameters.

    ``factor = min(1, max_norm / (norm + 1e-6))``, the formula of
    ``torch.nn.utils.clip_grad_norm_``. Half gradients are not touched: the factor joins the one
    that unscales them. Writes to gradients through ``grad.data`` leave no trace in torch, and may
    be missing in the norm; write to ``grad`` itself.

    Args:
        parameters: An optimizer given to ``preamp.initialize``, for everything that it updates;
            or, as in torch, parameters of models of one such call: an iterable of them or a single
            one, half ones or masters. Those without a gradient are passed over. What an optimizer
            has besides stays as it is.
        max_norm: Largest norm that stays as it is.
        norm_type: 2 for the Euclidean norm; any other, ``inf`` included, makes float32 gradients
            of the half ones first.
        error_if_nonfinite: Raise where the norm is infinite or nan, as after an overflow.
        foreach: Ignored; torch has it.

    Returns:
        float32 scalar tensor: the norm before clipping. Infinite or nan after an overflow, when
        the coming ``step`` is skipped.

    Raises:
        PreampStateError: The optimizer has no engine, parameters with gradients have none or
            several, no optimizer updates them, or gradients are incomplete.
        TypeError: ``parameters`` is neither.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite``; nothing was clipped.

    Mutates:
        Gradients. Synchronises with the device: never, but for ``error_if_nonfinite``.
    """
    del foreach
    engine, sessions, only = _to_clip(parameters, "clip_grad_norm_")
    is_euclidean = norm_type == 2.0
    found = _gradients_of(sessions, only, all_made=not is_euclidean)
    norm = None
    if is_euclidean and only is None:
        norm = sessions[0].take_norm()
    if norm is None:
        norm = found.norm(engine, norm_type)
    if is_euclidean and only is None:
        for tell in engine.events.norm_taken:
            tell(sessions[0], norm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be "
            "clipped. Pass error_if_nonfinite=False, and the coming step is skipped."
        )
    # A norm on the host that is below the bound, by more than rounding, needs no factor.
    if not (host_reaches(norm) and norm.item() < 0.999 * (max_norm - _EPS)):
        found.multiply_(engine.ops, (max_norm / (norm + _EPS)).clamp(max=1.0))
    return norm


@torch.no_grad()
def clip_grad_value_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clip each value of unscaled gradients to the range from ``-clip_value`` to ``clip_value``.

    Of half parameters the float32 gradients that their masters get, which takes 4 bytes for each.

    Args:
        parameters: As of `clip_grad_norm_`.
        clip_value: Largest magnitude that stays as it is.
        foreach: Ignored; torch has it.

    Raises:
        PreampStateError: As `clip_grad_norm_`.
        TypeError: ``parameters`` is neither.

    Mutates:
        Gradients. Synchronises with the device: never.
    """
    del foreach
    _, sessions, only = _to_clip(parameters, "clip_grad_value_")
    found = _gradients_of(sessions, only, all_made=True)
    for session in sessions:
        session.norm = None
    for grad in found.made:
        grad.clamp_(-clip_value, clip_value)
    for gradients in found.shown:
        gradients.show()


def _to_clip(given: Any, who: str) -> tuple[Engine, list[OptimizerSession], frozenset[int] | None]:
    """The engine, the optimizers, and the ``id`` of the model's parameters, if not all of one.

    Takes in what the script did to unscaled gradients.
    """
    only = None
    if not isinstance(given, (torch.Tensor, Iterable)) or isinstance(bare(given), Optimizer):
        engine = find_engine(given) or engine_of(given)  # which raises
        if id(bare(given)) not in engine.sessions:
            raise _not_to_clip(given, who)
        sessions = [engine.sessions[id(bare(given))]]
    else:
        params: list[Any] = [given] if isinstance(given, torch.Tensor) else [*given]
        engine, sessions, only = _owners_of(params, who)
    for session in sessions:
        session.check_outside_block(who)
        if session.gradients.is_shown:
            session.read_back_shown()
    return engine, sessions, only


def _owners_of(
    params: Sequence[Any], who: str
) -> tuple[Engine, list[OptimizerSession], frozenset[int] | None]:
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise _not_to_clip(param, who)
    leaves = {id(leaf): leaf for leaf in leaves_of(params)}
    engine = _engine_with(leaves, who)
    owned = {id(s): frozenset(map(id, s.model_params())) for s in engine.sessions.values()}
    sessions = [s for s in engine.sessions.values() if not owned[id(s)].isdisjoint(leaves)]
    if len(sessions) == 1 and owned[id(sessions[0])].issubset(leaves):
        return engine, sessions, None
    return engine, sessions, frozenset(leaves)


def _not_to_clip(given: Any, who: str) -> TypeError:
    return bad_type(
        f"{who} was given {with_article(type(given).__name__)}",
        "It takes one optimizer, parameters, or a single tensor",
        "Pass the optimizer that preamp.initialize returned, or model.parameters()",
    )


def _engine_with(leaves: Mapping[int, torch.Tensor], who: str) -> Engine:
    """The one engine whose optimizers update what has a gradient."""
    needed = {key for key, leaf in leaves.items() if leaf.grad is not None}
    every = [(engine, engine.updated_params()) for engine in engines_in_use()]
    having = [engine for engine, own in every if not own.isdisjoint(leaves)]
    whole = [engine for engine, own in every if needed <= own and engine in having]
    if len(whole) > 1:  # one that the model has left, or that waits for the garbage collector
        whole = [e for e in whole if any(find_engine(model) is e for model in e.own_models)]
    if len(whole) == 1:
        return whole[0]
    if len(having) > 1:
        got = "parameters of several engines"
        do = "Call it once for each optimizer: preamp.clip_grad_norm_(optimizer, max_norm)"
    elif leaves:
        which = "parameters, some of which" if having else "parameters that"
        got = f"{which} no optimizer given to preamp.initialize updates"
        do = "Pass the optimizer, or only parameters that it updates"
    else:
        got = "no parameters"
        do = "Pass the optimizer, or a list: a generator can be read only once"
    raise bad_state(
        f"{who} was given {got}",
        "A norm is taken of gradients that the optimizers of one preamp.initialize unscale",
        do,
    )


@dataclass(frozen=True, slots=True)
class _Gradients:
    """What is clipped together."""

    made: list[Any]  # gradients that lie in memory as they are
    lazy: list[HalfGradients]  # of which some are half, yet to be unscaled
    half: list[Any]  # the half gradients of these
    factors: list[Any]  # what unscales them
    owners: list[torch.Tensor]  # the model's parameters, of the made ones and then of the others
    splits: Splits
    shown: list[HalfGradients]  # which a script may look at after `GradScaler.unscale_`

    def norm(self, engine: Engine, order: float) -> torch.Tensor:
        """The norm of all, unscaled: a float32 scalar."""
        ops, owners, splits, device = engine.ops, self.owners, self.splits, engine.device
        grads, factors = self.made + self.half, [None] * len(self.made) + self.factors
        is_wide = torch.float64 in kinds_of(dtype_of, self.made)
        if order == 2.0 and not (is_wide or splits.given or has_sharded(owners)):
            return ops.l2norm(grads, factors, device)
        return total_norm(ops, grads, factors, owners, splits, device, order).float()

    @torch.no_grad()
    def multiply_(self, ops: Ops, factor: torch.Tensor) -> None:
        if self.made:
            ops.scale_add_(self.made, factor, [None] * len(self.made))
        for gradients in self.lazy:
            gradients.clip(factor)
        for gradients in self.shown:
            gradients.show()


def _gradients_of(
    sessions: Sequence[OptimizerSession], only: frozenset[int] | None, *, all_made: bool
) -> _Gradients:
    """The gradients of all that ``sessions`` update, or of parameters whose ``id`` is in it."""
    found = _Gradients([], [], [], [], [], sessions[0].splits, [])
    lazy: list[HalfGradients] = []
    for session in sessions:  # before any is asked for what is not made yet
        gradients = session.gradients
        lazy.append(gradients)
        if gradients.is_shown:
            found.shown.append(gradients)
        gradients.take_in()
        # One factor unscales all half gradients of an optimizer.
        if all_made or not (only is None or only.issuperset(map(id, session.model_params()))):
            gradients.make_all()
        owners, made = with_gradients(session.direct_params())
        if gradients.may_have_bases:
            pairs = zip(session.table.halves, gradients.bases(), strict=True)
            bases = [(half, base) for half, base in pairs if base is not None]
            owners += [half for half, _ in bases]
            made += [base for _, base in bases]
        if only is not None:  # of a weight in two optimizers both tell the same
            own = {*map(id, found.owners)}
            pairs = zip(made, owners, strict=True)
            pairs = [(g, p) for g, p in pairs if id(p) in only and id(p) not in own]
            made, owners = [grad for grad, _ in pairs], [param for _, param in pairs]
        found.made.extend(made)
        found.owners.extend(owners)
    for gradients in lazy:
        halves, grads, factors = gradients.pending()
        if halves:
            found.lazy.append(gradients)
            found.half.extend(grads)
            found.factors.extend(factors)
            found.owners.extend(halves)
    return found
