# SPDX-License-Identifier: BSD-3-Clause
"""The demo on several ranks learns what one process learns with the same batches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.demo import CORPUS
from cases.ranks import run_ranks
from demo.rank_runs import WAYS, small, train
from preamp import PreampUnavailableError
from preamp.demo.config import DemoConfig
from preamp.demo.parallel import RankResult, agreement_of, choose_parallel, digest, require_sharding
from preamp.demo.run import prepare, run
from preamp.demo.train import Watcher

BUDGETS = {"O0": 1e-5, "O1": 2e-3, "O2": 2e-3, "O3": 2e-3, "O4": 2e-2, "O5": 2e-2}
"""Bits per byte; half slices of a batch are multiplied in another order than all of it."""


@pytest.mark.full
def test_curves_are_those_of_one_process(tmp_path: Path) -> None:
    alone = run(prepare(small(), CORPUS), Watcher())
    ranks = run_ranks(train, tmp_path)
    for way in WAYS:
        first, second = (found[way] for found in ranks)
        for ours, other, wanted in zip(
            first["levels"], second["levels"], alone.levels, strict=True
        ):
            level = wanted.level
            assert ours["status"] == "finished"
            assert ours["losses"] == other["losses"]
            assert ours["losses"] == pytest.approx(wanted.losses, abs=BUDGETS[level]), level
            assert ours["held_out_bits"] == pytest.approx(wanted.held_out_bits, abs=0.02)
            assert ours["ranks"] == other["ranks"]
            assert [rank["rank"] for rank in ours["ranks"]] == [0, 1]
            assert len({rank["weights"] for rank in ours["ranks"]}) == (2 if way == "fsdp" else 1)
        assert first["config"]["parallel"] == way
    ddp = ranks[0]["ddp"]["levels"]
    fsdp = ranks[0]["fsdp"]["levels"] if "fsdp" in WAYS else ()
    for whole, shared in zip(ddp, fsdp, strict="fsdp" in WAYS):
        level = whole["level"]
        # The same halves of batches; only the norm for clipping is summed in another order.
        assert shared["losses"] == pytest.approx(whole["losses"], abs=BUDGETS[level] / 10), level
        assert shared["dtypes"] == whole["dtypes"]
        for name, held in whole["memory"].items():
            assert held == pytest.approx(2 * shared["memory"][name], rel=0.02), (level, name)
    if "fsdp" not in WAYS:
        pytest.skip("fully_shard of this torch needs events of streams, which its CPUs lack")


@pytest.mark.full
def test_torchrun_starts_it(tmp_path: Path) -> None:
    way = WAYS[-1]
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m preamp demo"
    options = f"--small --steps 3 --levels O2 --device cpu --parallel {way} --out"
    done = subprocess.run(
        [sys.executable, *launch.split(), *options.split(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Report:") == 1  # the first rank tells for all
    told = " ".join(done.stdout.split())
    weights = "" if way == "fsdp" else ", weights"
    assert f"The 2 ranks agree on losses, skipped steps, loss scale{weights}." in told
    document = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert document["config"]["ranks"] == 2
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"2, parallel {way}" in page


def _rank(rank: int, **changes: Any) -> RankResult:
    made = RankResult(rank=rank, steps_skipped=0, loss_scale=1.0, losses="a", weights="b")
    return replace(made, **changes)


def test_ranks_that_differ_are_told_so() -> None:
    ranks = (_rank(0), _rank(1, weights="c", steps_skipped=1))
    assert agreement_of(ranks, "ddp") == "The 2 ranks differ in skipped steps, weights."
    ranks = (_rank(0), _rank(1, weights="c"))
    assert agreement_of(ranks, "fsdp") == "The 2 ranks agree on losses, skipped steps, loss scale."


def test_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert choose_parallel("auto") == choose_parallel("none") == "none"
    text = (
        "--parallel ddp with 1 process. Choose none for one process, and ddp or fsdp "
        "for several. Start several with torchrun --nproc-per-node 2 -m preamp demo --parallel ddp."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        choose_parallel("ddp")
    with pytest.raises(ValueError, match=re.escape("--parallel 'tp'. Choose none")):
        choose_parallel("tp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert choose_parallel("auto") == "ddp"
    assert [choose_parallel(name) for name in ("ddp", "fsdp")] == ["ddp", "fsdp"]
    with pytest.raises(ValueError, match=re.escape("--parallel none with 2 processes.")):
        choose_parallel("none")


def test_sharding_needs_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CPUs lack in torch 2.6."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "Stream", object)
    require_sharding("ddp", cpu)
    require_sharding("fsdp", torch.device("meta"))
    text = (
        f"--parallel fsdp on CPUs with torch {torch.__version__}. Its fully_shard runs on "
        "accelerators only. Choose --parallel ddp, or install a newer torch."
    )
    with pytest.raises(PreampUnavailableError, match=re.escape(text)):
        require_sharding("fsdp", cpu)


def test_every_rank_needs_an_equal_part() -> None:
    text = (
        "Got 3 ranks for batches of 8 windows. Every rank gets an equal part of each batch. Start "
        "for example two: torchrun --nproc-per-node 2 -m preamp demo."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        DemoConfig(ranks=3)


def test_bytes_are_compared_by_their_digest() -> None:
    torch.manual_seed(0)
    from_one = torch.nn.Linear(2, 2)
    assert digest(from_one) == digest(from_one)
    with torch.no_grad():
        before = digest(from_one)
        from_one.weight[0, 0] += 1e-3
    assert digest(from_one) != before
