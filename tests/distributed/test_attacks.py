# SPDX-License-Identifier: BSD-3-Clause
"""A rank under ``fully_shard`` that fails, or does what the others do not do.

All ranks end within the timeout of their process group, with the reason. Other levels, other
parameters and an overflow on one rank alone end no rank; `fully_sharded_checks` and
`fully_sharded_programs` have them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cases.ranks import start_ranks
from distributed.attacks import GROUP_SECONDS, STEPS, run_rank
from distributed.survivors import PATIENCE_SECONDS
from distributed.test_fully_sharded import RUNS_ON_CPUS

pytestmark = pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs")

LOST = "RuntimeError: .*(closed by peer|reset by peer|[Tt]imed out)"
ON_PURPOSE = "ValueError: on purpose"
SAVING = "PreampError: Another rank did not answer while a checkpoint was saved"
COMPARING = "PreampError: Another rank did not answer while the ranks were compared"
FINISHED = f"finished, {STEPS} steps"

# What comes of an attack by the second rank on the first rank, and on the second.
ENDS = {
    "saves alone": (LOST, SAVING),
    "raises in a block": (LOST, ON_PURPOSE),
    "raises in a step": (LOST, ON_PURPOSE),
    "loads an engine alone": (LOST, COMPARING),
    "joins late": (FINISHED, FINISHED),
    "joins too late": (COMPARING, COMPARING),
}
QUICK = ("saves alone", "raises in a block")


@pytest.mark.parametrize(
    "attacks",
    [QUICK, pytest.param([name for name in ENDS if name not in QUICK], marks=pytest.mark.full)],
    ids=["quick", "rest"],
)
def test_every_rank_has_the_reason_in_time(tmp_path: Path, attacks: Sequence[str]) -> None:
    assert _exit_codes(tmp_path, attacks) == [0, 0]
    for attack in attacks:
        for rank, wanted in enumerate(ENDS[attack]):
            found = json.loads((tmp_path / attack / f"rank{rank}").read_text())
            assert re.match(wanted, found["came"], re.DOTALL), (attack, rank, found)
            assert found["seconds"] < PATIENCE_SECONDS / 2, (attack, rank)


@pytest.mark.full
@pytest.mark.parametrize("attack", ["is killed", "skips a block"])
def test_nobody_trains_on(tmp_path: Path, attack: str) -> None:
    """A block that one rank skips is followed by collectives that do not fit each other.

    gloo notices by their kinds, and the ranks wait until the timeout, or by their sizes, and ends
    one process: the other has its connection closed.
    """
    codes = _exit_codes(tmp_path, [attack])
    told = [json.loads(path.read_text())["came"] for path in (tmp_path / attack).glob("rank?")]
    assert told
    assert all(re.match(LOST, came, re.DOTALL) for came in told)
    assert sum(code == 0 for code in codes) == len(told)
    assert codes[1] != 0 or attack != "is killed"


def _exit_codes(folder: Path, attacks: Sequence[str]) -> list[int]:
    ranks = start_ranks(run_rank, (folder, attacks), 2).processes
    deadline = time.monotonic() + PATIENCE_SECONDS + 4 * GROUP_SECONDS * len(attacks)
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, "a rank still waits"
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
