# SPDX-License-Identifier: BSD-3-Clause
"""All variants of a step, and loops by hand, do the same work, and a case yields complete rows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import bench_step
import bench_storage
import preamp
from preamp.kernels import cpu_lacks_matmul
from preamp_bench import records, step, train
from preamp_bench.harness import Effort
from preamp_bench.loops import BY_HAND, SETTINGS, make_loop
from preamp_bench.records import Record
from preamp_bench.step import BF16_ONLY, FP32, HALF, Contender
from preamp_bench.tasks import TASKS, TaskConfig, make_task
from preamp_bench.weights import Gradients, StepCase, Weights, Work

CPU = torch.device("cpu")
TINY = Effort(seconds=0, most=5, warmup=0)
FIELDS = {
    *("benchmark", "name", "group", "status", "parameters", "tensors", "half", "clip"),
    *("date", "device", "cpu", "cores", "threads", "python", "torch", "preamp", "commit"),
}
MEASURED = FIELDS | {
    *("baseline", "best", "p20", "p50", "p80", "best_ratio", "ratio_p20", "ratio_p50", "ratio_p80"),
    *("rounds", "bytes_per_parameter", "share_of_copy", "copy_gb_s"),
}


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the function that would be compiled; compiling takes longer than all tests here."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def case(half: torch.dtype = torch.float16, *, clip: bool = True) -> StepCase:
    return StepCase(parameters=1003, tensors=4, half=half, clip=clip, device=CPU)


def weights_after(contender: Contender, of: StepCase, gradients: Gradients) -> list[Tensor]:
    work = contender.build(of, gradients)
    for _ in range(3):
        gradients.refill()
        work.step()
    return [weight.detach().double() for weight in work.weights]


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("half", HALF, ids=str)
def test_all_variants_of_a_group_agree(half: torch.dtype, clip: bool) -> None:
    of = case(half, clip=clip)
    for contenders, dtype, scale in ((FP32, torch.float32, 2.0**16), (HALF[half], half, of.scale)):
        gradients = Gradients(of, dtype, scale)
        first, *others = (weights_after(each, of, gradients) for each in contenders)
        start = [weight.detach().double() for weight in Weights(of).parameters()]
        # Three AdamW steps of 1e-4 move every weight by up to 3e-4; then they are rounded.
        ulp = torch.finfo(dtype).eps * max(weight.abs().max().item() for weight in start)
        assert distance(first, start) > 2e-4
        for other in others:
            assert distance(first, other) <= 1e-6 + ulp


def test_a_case_yields_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "BF16_ONLY", BF16_ONLY[:1])
    monkeypatch.setattr(step, "WITH_MASTERS", ())  # of packages that may be missing
    rows = step.run_case(case(torch.bfloat16), TINY)
    assert [set(row) for row in rows] == [MEASURED] * len(rows)
    assert [row["group"] for row in rows] == [
        *["float32"] * len(FP32),
        *["bfloat16"] * len(HALF[torch.bfloat16]),
        "bfloat16 only",
        "copy",
    ]
    assert rows[-1]["share_of_copy"] == pytest.approx(1)
    assert {row["parameters"] for row in rows} == {1003}


def failing(error: Exception, *, may_fail: bool) -> Contender:
    def build(_case: StepCase, _gradients: Gradients) -> Work:
        raise error

    return Contender(name="peer", build=build, bytes=lambda _: 1, may_fail=may_fail)


def rows_with(contender: Contender, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.setattr(step, "BF16_ONLY", (contender,))
    monkeypatch.setattr(step, "FP32", FP32[:1])
    monkeypatch.setitem(HALF, torch.bfloat16, HALF[torch.bfloat16][:1])
    return step.run_case(case(torch.bfloat16), TINY)


def test_what_is_missing_here_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("No module named 'peer'")
    row = rows_with(failing(error, may_fail=True), monkeypatch)[-1]
    assert set(row) == FIELDS | {"reason", "copy_gb_s"}
    assert (row["name"], row["status"]) == ("peer", "not measured")
    assert row["reason"] == "ImportError: No module named 'peer'"


def test_the_command_measures_prints_and_keeps_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(step, "BF16_ONLY", ())
    options = "--params 500 --tensors 3 --seconds 0 --clips no".split()
    bench_step.main([*options, "--out", str(tmp_path / "rows.jsonl")])
    torch.set_num_threads(threads)
    told = capsys.readouterr().out
    assert "preamp O2, FusedAdam" in told
    assert "bfloat16, no clipping" in told
    assert {row["parameters"] for row in records.read(tmp_path / "rows.jsonl")} == {500}


# -- the host's update ------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_it_times_every_storage(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        rows = bench_storage.host_updates(4096, threads, seconds=0.0)
    finally:
        torch.set_num_threads(before)
    groups = ["1 thread", "2 threads"][:threads]
    names = [f"{name}, {group}" for group in groups for name in ("copy", *bench_storage.UPDATED)]
    assert [row["name"] for row in rows] == names
    for row in rows:
        each = bench_storage.UPDATED.get(row["name"].partition(",")[0], 4.0)
        assert row["gb_s"] * row["best"] == pytest.approx(each * 4096 / 1e6)


# -- whole steps -----------------------------------------------------------------------------------


MEMORY = {"weights", "masters", "gradients", "optimizer_state", "peak_bytes", "parameters"}


def tiny(name: str = "gpt") -> TaskConfig:
    return TaskConfig(name=name, width=16, batch=2)


def weights_after_a_step(way: str, level: str, config: TaskConfig) -> list[Tensor]:
    loop = make_loop(make_task(config), way, level)
    try:
        loop.backward()
        loop.update()
        return [weight.detach().double() for weight in loop.model.parameters()]
    finally:
        if way != "by hand":
            preamp.engine_of(loop.optimizer).close()


@pytest.mark.parametrize("model", TASKS)
@pytest.mark.parametrize("level", BY_HAND)
def test_loops_by_hand_train_as_preamp_does(level: str, model: str) -> None:
    by_hand = weights_after_a_step("by hand", level, tiny(model))
    ours = weights_after_a_step("torch AdamW", level, tiny(model))
    for one, other in zip(by_hand, ours, strict=True):
        if level == "O0" or (level in ("O4", "O5") and not cpu_lacks_matmul(torch.bfloat16)):
            # The norm is summed in another order, and O5 rounds weights to bfloat16 once more.
            rtol = 2.0**-8 if level == "O5" else 0.0
            torch.testing.assert_close(one, other, rtol=rtol, atol=SETTINGS["lr"] * 1e-3)
        # Adam moves a weight by lr in its first step. Where products are rounded differently the
        # sign of a gradient near zero may be another one; on the whole the steps agree.
        assert (one - other).abs().mean() <= SETTINGS["lr"] / 4


@pytest.mark.full
def test_a_level_yields_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of workers that are processes."""
    monkeypatch.setattr(train, "LAUNCHES", 1)
    rows = train.run_level(tiny(), "O5", Effort(seconds=0, most=5))
    names = ["O5 by hand", train.AUTOCAST, "preamp O5, torch AdamW", "preamp O5, FusedAdam"]
    assert [row["name"] for row in rows] == names
    assert {row["baseline"] for row in rows} == {"O5 by hand"}
    assert {row["threads"] for row in rows} == {1}
    for row in rows:
        assert row["best"] > 0
        assert row.keys() >= MEMORY | {"to_autocast", *records.provenance(torch.device("cpu"))}
