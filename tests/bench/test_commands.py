# SPDX-License-Identifier: BSD-3-Clause
"""The benchmarks' commands: options reach the measurement, rows the file, refusals come first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import bench_step
import bench_train
from preamp_bench import records, step, train

COMMANDS = {"step": bench_step.main, "train": bench_train.main}


@dataclass(frozen=True)
class Result:
    """What a command printed, and how it ended."""

    status: int
    output: str
    errors: str


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Invoke]:
    """Call a benchmark with these options; its rows go to a file of the test's."""
    threads = torch.get_num_threads()

    def run(command: str, *options: str) -> Result:
        status = 0
        try:
            COMMANDS[command]([*options, "--out", str(tmp_path / "rows.jsonl")])
        except SystemExit as error:
            status = int(str(error.code))
        return Result(status, *capsys.readouterr())

    yield run
    torch.set_num_threads(threads)


def row_of(facts: records.Record) -> records.Record:
    numbers = dict.fromkeys(
        ("best", "p50", "best_ratio", "ratio_p20", "ratio_p80", "share_of_copy"), 0.5
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


def test_step_measures_every_combination(
    cases: list[step.StepCase], tmp_path: Path, invoke: Invoke
) -> None:
    done = invoke("step", "--params", "1e3,2000", "--tensors", "10, 20")
    assert done.status == 0, done.errors
    assert {(c.parameters, c.tensors, c.half, c.clip) for c in cases} == {
        (count, tensors, half, True)
        for count in (1000, 2000)
        for tensors in (10, 20)
        for half in (torch.float16, torch.bfloat16)
    }
    assert len(records.read(tmp_path / "rows.jsonl")) == 16
    assert "1,000 parameters in 10 tensors, float16, clipping" in done.output
    assert "50.0%" in done.output
    assert "peer: not measured, ImportError: [no] peer" in done.output


@pytest.mark.parametrize(
    ("clips", "wanted"), [("yes", {True}), ("no", {False}), ("both", {True, False})]
)
def test_steps_clip_as_they_are_told(
    clips: str, wanted: set[bool], cases: list[step.StepCase], invoke: Invoke
) -> None:
    assert invoke("step", "--clips", clips, "--tensors", "10").status == 0
    assert {case.parameters for case in cases} == {10**6, 10**7}
    assert {case.clip for case in cases} == wanted


def test_step_runs_end_to_end(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(step, "BF16_ONLY", ())
    done = invoke("step", "--params", "500", "--tensors", "3", "--seconds", "0", "--clips", "no")
    assert done.status == 0, done.errors
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
        (("step", "--device", "abacus"), ("--device 'abacus' does not work here",)),
        (("train", "--levels", "O9"), ("--levels got 'O9'", "O0, O1")),
        (("train", "--models", "bert"), ("--models got 'bert'", "gpt, convnet")),
        (("train", "--width", "6"), ("Got width=6",)),
        (("train", "--batch", "1"), ("Got batch=1",)),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], parts: tuple[str, ...], cases: list[step.StepCase], invoke: Invoke
) -> None:
    done = invoke(*arguments)
    assert done.status == 2
    assert done.errors.startswith("Error: ")
    for part in parts:
        assert part in done.errors
    assert not cases


def test_train_measures_every_combination(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, invoke: Invoke
) -> None:
    seen: list[tuple[str, str, int, int]] = []

    def run_level(task: train.TaskConfig, level: str, _effort: object) -> list[records.Record]:
        seen.append((task.name, level, task.width, task.batch))
        facts = {"model": task.name, "width": 8, "batch": 4, "level": level}
        return [row_of(facts), missing(facts)]

    monkeypatch.setattr(train, "run_level", run_level)
    done = invoke("train", "--levels", "O0,O5", "--width", "8", "--batch", "4")
    assert done.status == 0, done.errors
    assert seen == [(model, level, 8, 4) for model in ("gpt", "convnet") for level in ("O0", "O5")]
    assert len(records.read(tmp_path / "rows.jsonl")) == 8
    assert "convnet, width 8, batch 4, O5" in done.output
    assert "peer: not measured" in done.output
