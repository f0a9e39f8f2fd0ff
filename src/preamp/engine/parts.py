# SPDX-License-Identifier: BSD-3-Clause
"""Parts of an engine that load with the first one, not with ``import preamp``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from preamp.engine.recording import Recording

if TYPE_CHECKING:
    from preamp.engine.agreement import RankComparison
    from preamp.engine.core import EngineCore
    from preamp.engine.events import Events
    from preamp.engine.recorder import Recorder
    from preamp.engine.trace import Tracer
    from preamp.numerics import History, RunRecord


def make_tracer(models: Sequence[nn.Module], events: Events) -> Tracer:
    """Return what watches the modules of ``models`` where that is asked for."""
    from preamp.engine.trace import Tracer

    return Tracer(models, events)


def make_comparison(engine: EngineCore) -> RankComparison:
    """Return what compares the ranks that train the models of ``engine``."""
    from preamp.engine.agreement import RankComparison

    return RankComparison(engine)


def make_recorder(engine: EngineCore, recording: Recording) -> Recorder:
    """Do what `preamp.engine.recorder.make_recorder` does."""
    from preamp.engine import recorder

    return recorder.make_recorder(engine, recording)


def run_record(engine: EngineCore) -> RunRecord:
    """Say what the run is."""
    from preamp.engine import recorder

    return recorder.run_record(engine)


def explain_engine(engine: EngineCore) -> str:
    """Return the text of `Engine.explain`."""
    from preamp.engine import explain

    return explain.explain_engine(engine)


def write_report(history: History, path: Path, *, title: str) -> None:
    """Do what `Engine.report` does."""
    from preamp.report import write

    write(path, history, title=title)
