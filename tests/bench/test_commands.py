# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks' commands: options reach the measurement, rows the file, refusals come first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from preamp_bench import distributed, records, step, train
from preamp_bench.commands import bench


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


def row_of(facts: records.Record) -> records.Record:
    numbers = dict.fromkeys(
        ("best", "p50", "best_ratio", "ratio_p20", "ratio_p80", "share_of_copy", "copy_gb_s"), 0.5
    )
    memory = dict.fromkeys(("weights", "masters", "gradients", "optimizer_state"), 4.0)
    return {
        **facts,
        **numbers,
        **memory,
        "name": "ours",
        "group": "g",
        "status": "measured",
        "bytes_per_parameter": 30,
        "peak_bytes": 123e6,
    }


def missing(facts: records.Record) -> records.Record:
    return records.not_measured("peer", "g", "ImportError: [no] peer", **facts)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[step.StepCase]:
    seen: list[step.StepCase] = []

    def run_case(case: step.StepCase, _effort: object, threads: int) -> list[records.Record]:
        assert threads == 1
        seen.append(case)
        facts = {
            "parameters": case.parameters,
            "tensors": case.tensors,
            "half": str(case.half),
            "clip": case.clip,
        }
        return [row_of(facts), missing(facts)]

    monkeypatch.setattr(step, "run_case", run_case)
    return seen


def test_step_measures_every_combination(cases: list[step.StepCase], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = invoke("step", "--params", "1e3,2000", "--tensors", "10, 20", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert {(c.parameters, c.tensors, c.half, c.clip) for c in cases} == {
        (count, tensors, half, True)
        for count in (1000, 2000)
        for tensors in (10, 20)
        for half in (torch.float16, torch.bfloat16)
    }
    assert len(records.read(out)) == 16
    assert "1,000 parameters in 10 tensors" in done.output
    assert "50.0%" in done.output
    assert "peer  not measured: ImportError: [no] peer" in done.output


@pytest.mark.parametrize(
    ("clips", "wanted"), [("yes", {True}), ("no", {False}), ("both", {True, False})]
)
def test_steps_clip_as_they_are_told(
    clips: str, wanted: set[bool], cases: list[step.StepCase]
) -> None:
    assert invoke("step", "--clips", clips, "--tensors", "10").exit_code == 0
    assert {case.parameters for case in cases} == {10**6, 10**7}
    assert {case.clip for case in cases} == wanted


def test_step_runs_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(step, "BF16_ONLY", ())
    try:
        done = invoke(
            "step", "--params", "500", "--tensors", "3", "--seconds", "0", "--clips", "no"
        )
    finally:
        torch.set_num_threads(threads)
    assert done.exit_code == 0, done.output
    assert "preamp O2, FusedAdam" in done.output
    assert "bfloat16, no clipping" in done.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("step", "--params", "many"), ("--params got 'many'", "whole numbers above zero")),
        (("step", "--tensors", "1.5"), ("--tensors got '1.5'", "--tensors 1000,1e6")),
        (("step", "--params", "inf"), ("--params got 'inf'",)),
        (("step", "--params", "5", "--tensors", "6"), ("Got 5 parameters in 6 tensors",)),
        (("step", "--clips", "some"), ("--clips got 'some'", "yes, no, both")),
        (("step", "--device", "abacus"), ("--device 'abacus' is not known",)),
        (("train", "--levels", "O9"), ("Opt level 'O9' is not known",)),
        (("train", "--models", "bert"), ("Got model 'bert'", "gpt, convnet")),
        (("train", "--width", "6"), ("Got width=6",)),
        (("train", "--batch", "1"), ("Got batch=1",)),
        (("distributed", "--width", "0"), ("Got width=0",)),
        (("distributed", "--rounds", "1"), ("rounds=1",)),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], parts: tuple[str, ...], cases: list[step.StepCase]
) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ")
    for part in parts:
        assert part in done.stderr
    assert not cases


def test_train_measures_every_combination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, str, int, int]] = []

    def run_level(task: train.TaskConfig, level: str, _effort: object) -> list[records.Record]:
        seen.append((task.name, level, task.width, task.batch))
        facts = {"model": task.name, "width": 8, "batch": 4, "level": level}
        rows = [row_of(facts), {**row_of(facts), "peak_bytes": None}, missing(facts)]
        return [{**row, "to_autocast": 0.9} for row in rows] if level == "O5" else rows

    monkeypatch.setattr(train, "run_level", run_level)
    out = tmp_path / "rows.jsonl"
    options = ("--levels", "O0,O5", "--width", "8", "--batch", "4", "--out", str(out))
    done = invoke("train", *options)
    assert done.exit_code == 0, done.output
    assert seen == [(model, level, 8, 4) for model in ("gpt", "convnet") for level in ("O0", "O5")]
    assert len(records.read(out)) == 12
    assert "to autocast" in done.output
    assert "123" in done.output
    assert "peer  not measured" in done.output


@pytest.mark.full
def test_distributed_runs_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = invoke("distributed", "--width", "64", "--rounds", "2", "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = records.read(out)
    names = [*distributed.WAYS, *distributed.COLLECTIVES]
    assert [row["name"] for row in rows] == names
    assert {row["ranks"] for row in rows} == {2}
    assert {row["baseline"] for row in rows if row["group"] == "FSDP2"} == {"plain FSDP2"}
    assert all(name in done.output for name in names)
    small = rows[-2]
    assert distributed.derived(small) == {
        8: small["best"] * 3,
        64: small["best"] * 6,
        1024: small["best"] * 10,
    }
