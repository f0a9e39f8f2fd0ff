# SPDX-License-Identifier: BSD-3-Clause
"""Gives engines their watchers, which load with the first engine, not with ``import preamp``."""

from preamp.engine import watchers
from preamp.engine.core import EngineCore
from preamp.engine.recording import Recording


def make_watchers(
    engine: EngineCore, recording: Recording
) -> tuple[watchers.Tracer, watchers.Recorder]:
    """Make what hears of an engine's overflows and makes its records, the tracer first."""
    from preamp.watch.recorder import Recorder
    from preamp.watch.trace import Tracer

    return Tracer(engine), Recorder(engine, recording)


watchers.make_watchers = make_watchers
