# SPDX-License-Identifier: BSD-3-Clause
"""Parts of an engine that load with the first one, not with ``import preamp``."""

from typing import TYPE_CHECKING

from preamp.core.late import names

if TYPE_CHECKING:
    from preamp.engine.agreement import RankComparison as RankComparison
    from preamp.engine.explain import explain_engine as explain_engine
    from preamp.report import write as write
    from preamp.watch.recorder import make_recorder as make_recorder
    from preamp.watch.recorder import run_record as run_record
    from preamp.watch.trace import Tracer as Tracer

__getattr__, __dir__ = names(
    "preamp.engine.parts",
    RankComparison=".agreement",
    Tracer="..watch.trace",
    explain_engine=".explain",
    make_recorder="..watch.recorder",
    run_record="..watch.recorder",
    write="..report",
)
