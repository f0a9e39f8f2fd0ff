# SPDX-License-Identifier: BSD-3-Clause
"""All variants of a step do the same work, and a case yields complete rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import bench_storage
from preamp_bench import step, torch_steps
from preamp_bench.harness import Effort
from preamp_bench.records import Record
from preamp_bench.step import BF16_ONLY, FP32, HALF, Contender
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


def test_sizes_add_up() -> None:
    assert case().sizes == [251, 251, 251, 250]
    assert sum(p.numel() for p in Weights(case()).parameters()) == 1003


@pytest.mark.parametrize("tensors", [0, 1004])
def test_tensors_without_elements_are_refused(tensors: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"1003 parameters in {tensors} tensors")):
        StepCase(parameters=1003, tensors=tensors, half=torch.float16, clip=True, device=CPU)


@pytest.mark.parametrize(
    ("half", "clip", "expected"),
    [
        (torch.float16, True, 30),
        (torch.float16, False, 30),
        (torch.bfloat16, True, 30),
        (torch.bfloat16, False, 28),  # nothing to unscale, nothing to clip: no check
    ],
)
def test_least_bytes_are_those_of_the_design(half: torch.dtype, clip: bool, expected: int) -> None:
    assert case(half, clip=clip).half_bytes == expected
    assert case(half, clip=clip).fp32_bytes == 32


def test_gradients_are_put_back() -> None:
    gradients = Gradients(case(), torch.float16, 4.0)
    weights = list(Weights(case()).half().parameters())
    gradients.attach(weights)
    before = [weight.grad.clone() for weight in weights if weight.grad is not None]
    for weight in weights:
        assert weight.grad is not None
        weight.grad.zero_()
    gradients.refill()
    assert all(torch.equal(a, b.grad) for a, b in zip(before, weights, strict=True))


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


def test_what_must_run_does_not_fail_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        rows_with(failing(ZeroDivisionError(), may_fail=False), monkeypatch)


def test_a_case_that_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_free_bytes", lambda _device: 2.0**29)
    (row,) = step.run_case(case(), TINY)
    assert set(row) == FIELDS | {"reason"}
    assert row["reason"] == "needs about 1 GiB, 0 GiB are free"


def test_a_small_tensor_is_not_credited_to_a_peer() -> None:
    build: Callable[..., Any] = step.of_module("torch.optim", "AdamW", least=4096)
    with pytest.raises(
        ValueError, match="tensors below 4096 elements are treated as torch treats them"
    ):
        build(case(), Gradients(case(), torch.bfloat16, 1.0))


def test_overflow_is_found_by_hand_too() -> None:
    for build in (
        torch_steps.naive_masters,
        torch_steps.kept_masters,
        torch_steps.compiled_masters,
    ):
        for clip in (True, False):
            of = case(clip=clip)
            work = build(of, Gradients(of, torch.float16, 2.0**40))
            before = [weight.detach().clone() for weight in work.weights]
            work.step()
            assert all(torch.equal(a, b) for a, b in zip(before, work.weights, strict=True))


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
