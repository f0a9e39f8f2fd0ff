# SPDX-License-Identifier: BSD-3-Clause
"""The soak passes in a short form, and notices what it is there to notice."""

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from preamp.checkpoint import read_checkpoint
from preamp_bench import records
from soak_checks import check, growth
from soak_training import FINAL, SIZE, Memory, Options, train

ROOT = Path(__file__).parents[2]
OPTIONS = Options("O2", 40, 37)
MIB = 1 << 20


@pytest.mark.full
def test_a_short_soak_passes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/soak.py"), "--steps", "40", "--seed", "37"]
    done = subprocess.run(
        [*command, "--levels", "O2", "--results", tmp_path / "rows"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = records.read(tmp_path / "rows")
    assert (row["level"], row["steps"]) == ("O2", 40)
    assert row["applied"] + row["skipped"] == 2 * 40
    assert min(row[what] for what in ("skipped", "saves", "reloads", "kills")) > 0
    assert row["memory"].keys() == {"straight", "reloaded"}
    assert f"O2, seed 37: 40 steps, {row['applied']} applied" in done.stdout
    assert "all ends are equal" in done.stdout


def content(tmp_path: Path) -> dict[str, Any]:
    """The end of a training without saves."""
    gc.collect()
    gc.freeze()  # or each of its many counts would walk through what all tests have left
    train(OPTIONS, tmp_path, checkpoints=False, reloads=False, report=lambda _: None)
    return read_checkpoint(tmp_path / FINAL)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_another_end_is_noticed(tmp_path: Path) -> None:
    ends = [content(tmp_path / name) for name in ("one", "other")]
    check(OPTIONS, {"straight": ends[0], "killed": ends[1]})
    weights = ends[1]["models"][0]["state"]
    weights["4.bias"] = weights["4.bias"] + 2**-20
    with pytest.raises(SystemExit, match=r"killed: other than straight in \['models/0/state/4.b"):
        check(OPTIONS, {"straight": ends[0], "killed": ends[1]})
    ends[0]["engines"][0]["scalers"]["steps"][0]["applied"] -= 1
    with pytest.raises(SystemExit, match="counters are"):
        check(OPTIONS, {"straight": ends[0]})
    ends[0]["engines"][0]["scalers"]["steps"][0]["applied"] += 1
    ends[0]["models"][1]["state"]["weight"] = torch.ones(SIZE)
    with pytest.raises(SystemExit, match="the lattice's weights"):
        check(OPTIONS, {"straight": ends[0]})


@pytest.mark.parametrize(
    ("what", "per_sample"),
    [("rss", MIB // 2), ("tensors", 1), ("objects", 100), ("files", 1), ("threads", 1), (None, 0)],
)
def test_growth_is_noticed(what: str | None, per_sample: int) -> None:
    flat = {"rss": 300 * MIB, "tensors": 50, "objects": 9000, "files": 7, "threads": 1}
    samples = [
        Memory(
            step=2000 + 100 * number,
            **{name: size + per_sample * number * (name == what) for name, size in flat.items()},
        )
        for number in range(15)
    ]
    grown = growth(samples)
    assert grown is None if what is None else grown is not None and grown.startswith(what)
    assert growth(samples[:8]) is None  # too few to tell
