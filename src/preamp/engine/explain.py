# SPDX-License-Identifier: BSD-3-Clause
"""An engine's decisions in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from preamp.core.dtypes import dtype_name
from preamp.engine.session import OptimizerSession
from preamp.engine.storage import describe_place, describe_storage, uses_host
from preamp.kernels import explain
from preamp.policy import Storage, describe_overrides
from preamp.policy.storage import storage_name

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore


def explain_engine(engine: EngineCore) -> str:
    """Return the text of `Engine.explain`."""
    policy = engine.policy
    if not policy.enabled:
        return "preamp is off (enabled=False): every call passes through."
    lines = [policy.brief.strip()]
    lines += [
        f"  {name} = {_show(value)} (default of {policy.opt_level}: {_show(default)})"
        for name, default, value in describe_overrides(policy)
    ]
    lines.append(_casts(engine))
    for index, model in enumerate(engine.models):
        counts = Counter(dtype_name(param.dtype) for param in model.parameters())
        found = ", ".join(f"{n} {name}" for name, n in sorted(counts.items())) or "none"
        lines.append(f"model {index} ({type(model).__name__}): parameters {found}")
    for index, session in enumerate(engine.sessions.values()):
        lines.append(
            f"optimizer {index} ({type(session.optimizer).__name__}): {len(session.table)} "
            f"float32 masters, {len(session.direct_params())} parameters updated directly; "
            f"{_waits(engine, session)}"
        )
        names = engine.names
        if unowned := [names.of(p) for p in session.model_params() if not names.is_owned(p)]:
            lines.append(f"  trained but in no model, left as they are: {', '.join(unowned)}")
    lines += describe_storage(engine)
    for index, scaler in enumerate(engine.scalers):
        kind = "dynamic" if scaler.is_dynamic else "static"
        lines.append(f"loss {index}: {kind} scale, now {scaler.value()}")
    lines.append(explain(engine.ops.name, engine.device))
    return "\n".join(lines)


def _waits(engine: EngineCore, session: OptimizerSession) -> str:
    wait = "one host synchronisation per step"
    if uses_host(engine) and engine.policy.storage.release_gradients:
        return f"{wait}, and for gradients behind the last two"
    is_asked = engine.policy.is_dynamic and not session.obeys_on_device
    return wait if is_asked or uses_host(engine) else "no synchronisation"


def summary_of(engine: EngineCore) -> str:
    """The decisions in one line, as ``preamp.initialize`` prints them. Does not synchronise."""
    policy = engine.policy
    half = dtype_name(policy.half_dtype or torch.float32)
    masters = sum(len(session.table) for session in engine.sessions.values())
    return (
        f"preamp: {policy.opt_level} in {half}, {masters or 'no'} float32 masters, "
        f"loss scale {policy.loss_scale}, back end {engine.ops.name}"
        + (f", {describe_place(engine)}" if policy.storage.place == "host" else "")
    )


def _casts(engine: EngineCore) -> str:
    policy = engine.policy
    if engine.casts_functions:
        where = "in the whole thread" if policy.scope == "thread" else "inside the models"
        return f"functions are cast to {_show(policy.patch_torch_functions_type)} {where}"
    if policy.cast_model_type is None:
        return "models, inputs and functions are not cast"
    kept = engine.conversion.kept
    batchnorm = ", batch norm stays float32" if policy.keep_batchnorm_fp32 else ""
    constants = ", ".join(kept.constants.values())
    named = len(kept.named)
    return (
        f"models and their inputs are cast to {_show(policy.cast_model_type)}{batchnorm}"
        + (f", {named} tensors that keep_fp32 names stay float32" if named else "")
        + (f", so do buffers that are not persistent ({constants})" if constants else "")
    )


def _show(value: object) -> str:
    if isinstance(value, Storage):
        seed = f" with seed {value.seed}" if value.seed else ""
        return storage_name(value) + seed
    return str(value).removeprefix("torch.")
