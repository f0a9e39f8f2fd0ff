# SPDX-License-Identifier: BSD-3-Clause
"""``optimizer._amp_stash`` and the private methods that scripts written for Apex call."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from preamp.compat.scaler import LossScaler
from preamp.core.undo import Step, all_or_nothing, set_attribute
from preamp.engine import Engine
from preamp.engine.block import unscale
from preamp.engine.overflow import GradientNote
from preamp.engine.session import OptimizerSession
from preamp.optim import is_master

Params = list[torch.Tensor]


class AmpStash:
    """Apex's view of an optimizer's half parameters and masters; lists are made when read."""

    def __init__(self, session: OptimizerSession) -> None:
        self._session = session
        self.lazy_init_called = True
        self.process_zero_grad = True

    def _groups(self) -> Iterator[list[Any]]:
        for group in self._session.optimizer.param_groups:
            yield group["params"]

    @property
    def fp32_from_fp16_groups(self) -> list[Params]:
        """The masters, by group."""
        return [[p for p in group if is_master(p)] for group in self._groups()]

    @property
    def fp16_groups(self) -> list[Params]:
        """The half parameters that have masters, by group, in the masters' order."""
        return [
            [p.twin.half for p in group if is_master(p) and p.twin is not None]
            for group in self._groups()
        ]

    @property
    def fp32_from_fp32_groups(self) -> list[Params]:
        """The trainable parameters without a master, by group."""
        return [
            [p for p in group if not is_master(p) and p.requires_grad] for group in self._groups()
        ]

    @property
    def all_fp16_params(self) -> Params:
        """All half parameters that have masters."""
        return [param for group in self.fp16_groups for param in group]

    @property
    def all_fp32_from_fp16_params(self) -> Params:
        """All masters."""
        return [param for group in self.fp32_from_fp16_groups for param in group]

    @property
    def all_fp32_from_fp32_params(self) -> Params:
        """All trainable parameters without a master."""
        return [param for group in self.fp32_from_fp32_groups for param in group]

    @property
    def all_fp32_params(self) -> Params:
        """Without masters, Apex's name for what the optimizer updates in float32."""
        return self.all_fp32_from_fp32_params

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped."""
        return self._session.overflowed()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients were left scaled: ``delay_unscale`` unscales at once."""
        return False


def attach_stashes(engine: Engine) -> None:
    """Give the engine's optimizers Apex's attributes; ``engine.close()`` removes them."""
    for session in engine.sessions.values():
        for name, value in _attributes(engine, session).items():
            set_attribute(session.optimizer, name, value, engine.undo)


def _attributes(engine: Engine, session: OptimizerSession) -> dict[str, Any]:
    backward = _Backward(engine, session)
    return {
        "_amp_stash": AmpStash(session),
        "_lazy_init_maybe_master_weights": session.table.adopt,
        "_amp_lazy_init": session.table.adopt,
        "_master_params_to_model_params": session.table.write_halves,
        "_prepare_amp_backward": backward.prepare,
        "_post_amp_backward": backward.post,
    }


class _Backward:
    """The halves of a ``scale_loss`` block, called by hand; only the caller adjusts the scale."""

    def __init__(self, engine: Engine, session: OptimizerSession) -> None:
        self._engine = engine
        self._session = session

    def prepare(self) -> None:
        """Set earlier gradients aside before a backward. Mutates the parameters' ``grad``."""
        self._session.check_outside_block("_prepare_amp_backward")
        self._session.table.adopt()
        try:
            self._session.begin(self._engine.scaler(0), set())
        except BaseException:
            self._session.undo()
            raise

    def post(self, scaler: LossScaler) -> None:
        """Unscale the gradients of the backward and add the earlier ones.

        ``scaler`` is the one of ``amp._amp_state.loss_scalers`` by whose scale the loss was
        multiplied. Mutates gradients, and the flag that its ``update_scale()`` looks at.
        """
        core = scaler.core
        note = GradientNote(
            loss_id=self._engine.scalers.index(core) if core in self._engine.scalers else 0,
            loss_finite=torch.ones((), dtype=torch.bool, device=core.device),
            scale=core.scale.clone(),
        )
        self._engine.recorder.measure([self._session], note)

        def prepare() -> list[Step]:
            steps, found_inf = unscale([self._session], core, note)
            return steps if found_inf is None else [*steps, partial(core.record, found_inf)]

        all_or_nothing(prepare, self._session.undo)
