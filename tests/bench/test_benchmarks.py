# SPDX-License-Identifier: BSD-3-Clause
"""Variants and loops by hand do the same work, rows are complete, and tables are what they say."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import preamp
import table
from preamp.kernels import cpu_lacks_matmul
from preamp_bench import records
from preamp_bench.harness import FEWEST_ROUNDS, Effort, Variant, measure, stopwatch
from preamp_bench.loops import BY_HAND, SETTINGS, make_loop
from preamp_bench.step import FP32, HALF, Contender
from preamp_bench.tasks import TASKS, TaskConfig, make_task
from preamp_bench.weights import Gradients, StepCase, Weights

CPU = torch.device("cpu")
TINY = Effort(seconds=0, most=5, warmup=0)


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


# -- whole steps -----------------------------------------------------------------------------------


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


# -- the harness, and tables of what it measured ---------------------------------------------------


SHORT = Effort(seconds=0, most=FEWEST_ROUNDS, warmup=1)


def taking(milliseconds: float, name: str, group: str = "g") -> Variant:
    return Variant(name=name, group=group, seconds=lambda: milliseconds / 1e3)


def test_variants_take_turns() -> None:
    calls: list[str] = []
    variants = [
        Variant(
            name=name,
            group="g",
            seconds=stopwatch(
                lambda name=name: calls.append(name),
                prepare=lambda name=name: calls.append(f"prepare {name}"),
            ),
        )
        for name in "ab"
    ]
    measure(variants, SHORT)
    assert calls[:4] == ["prepare a", "a", "prepare b", "b"]
    assert calls[4:12] == [*calls[:4], "prepare b", "b", "prepare a", "a"]
    assert calls.count("a") == calls.count("b") == FEWEST_ROUNDS + 1


def test_ratios_are_to_the_first_of_the_group() -> None:
    variants = [taking(4, "slow"), taking(1, "fast"), taking(2, "other", "h")]
    rows = measure(variants, SHORT)
    assert [row.baseline for row in rows] == ["slow", "slow", "other"]
    assert [row.best for row in rows] == pytest.approx([4, 1, 2])
    assert [row.best_ratio for row in rows] == pytest.approx([1, 0.25, 1])
    assert rows[1].ratio_p20 == pytest.approx(0.25)
    assert rows[1].ratio_p80 == pytest.approx(0.25)


# -- the table --------------------------------------------------------------------------------


MACHINE = {"device": "CPU", "torch": "2.9", "python": "3.12", "commit": "abc", "threads": 1}
UPDATE = {"parameters": 1000, "tensors": 10, "half": "float16", "clip": True}
NAMES = {"torch, naive": 1234.5, "GradScaler + fused AdamW": 4.0, "preamp O2, FusedAdam": 2.0}


def update(name: str, best: float, day: int = 1, **changes: object) -> records.Record:
    date = {"date": f"2026-01-0{day}", "name": name, "best": best, "status": "measured"}
    return {**MACHINE, **UPDATE, **date, **changes}


def test_a_line_has_the_latest_run_of_the_newest_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [update(name, best, day=2) for name, best in NAMES.items()]
    rows += [update("preamp O2 split, FusedAdam", 3.0, day=1)]  # of an earlier run
    rows += [update("torch, naive", 5.0, day=1, device="another")]
    rows += [update("torch, naive", 5.0, day=3, clip=False)]
    rows += [{**rows[0], **records.not_measured("preamp O2 compact, FusedAdam", "", "why")}]
    records.append(tmp_path / "step.jsonl", rows)
    step = {"model": "gpt", "level": "O5"}
    records.append(tmp_path / "train.jsonl", [update("preamp O5, FusedAdam", 9.0, **step)])
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["table.py"])
    table.main()
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| update of 1,000 in 10 | O2 | 1,234 | 4.00 | – | 2.00 | – | – | 0.50 | abc |",
        "| gpt | O5 | – | – | – | 9.00 | – | – | – | abc |",
    ]
