# SPDX-License-Identifier: BSD-3-Clause
"""The recorder of an engine, and the record of how a run began."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import is_lazy

from preamp.casting import CastAudit
from preamp.core.dtypes import dtype_name
from preamp.core.ranks import is_first_rank
from preamp.core.version import __version__
from preamp.engine.inventory import Inventory
from preamp.engine.meter import Meter
from preamp.engine.recorder import Recorder
from preamp.engine.recording import Recording
from preamp.numerics import History, RunRecord

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore


def make_recorder(engine: EngineCore, recording: Recording) -> Recorder:
    """Open the history and listen to the engine's ledger.

    Of several processes the first one writes the file; the others keep their records in memory.

    Raises:
        PreampStateError: Somebody else writes to the file.
        ValueError: The file holds something else than records.
        OSError: It cannot be written.
    """
    recorder = Recorder(
        History(recording.path if is_first_rank() else None),
        recording,
        Meter(engine.names, engine.policy.half_dtype),
        engine.scalers,
        engine.sessions.values(),
        engine.ledger.lock,
    )
    audit = None
    if recording.numerics == "full" and engine.casts_functions:
        audit = CastAudit()
        audit.start()
        engine.process_undo.push(audit.stop)
    if recording.numerics != "off":
        recorder.inventory = Inventory(engine, audit)
    recorder.listen(engine.events, engine.ledger)
    return recorder


def run_record(engine: EngineCore) -> RunRecord:
    """Say what the run is: the decisions, the parameters, the machine."""
    params = {engine.names.of(p): p for model in engine.models for p in model.parameters()}
    on_gpu = engine.device.type == "cuda"
    policy = dataclasses.asdict(engine.policy)
    return RunRecord(
        preamp=__version__,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(engine.device) if on_gpu else engine.device.type,
        opt_level=engine.policy.opt_level,
        policy={name: str(value).removeprefix("torch.") for name, value in policy.items()},
        parameters={name: 0 if is_lazy(p) else p.numel() for name, p in params.items()},
        dtypes={name: dtype_name(param.dtype) for name, param in params.items()},
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
