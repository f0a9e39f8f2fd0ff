# SPDX-License-Identifier: BSD-3-Clause
"""Loops by hand train as preamp's do; workers answer; a level yields complete rows."""

from __future__ import annotations

import io
import json
import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import preamp
from preamp.kernels import cpu_lacks_matmul
from preamp_bench import records, train, worker
from preamp_bench.gpt import GPT, ModelConfig, attend, loss_of
from preamp_bench.harness import Effort
from preamp_bench.loops import BY_HAND, SETTINGS, Masters, make_loop
from preamp_bench.tasks import TASKS, TaskConfig, make_task
from preamp_bench.text import held_out_batches, is_held_out, read_text, training_batches, windows
from preamp_bench.worker import Job, Worker, WorkerError

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


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_fused_adam_trains_as_torch_does(level: str) -> None:
    ours = weights_after_a_step("FusedAdam", level, tiny())
    for one, other in zip(weights_after_a_step("torch AdamW", level, tiny()), ours, strict=True):
        assert (one - other).abs().mean() <= SETTINGS["lr"] / 100


def test_masters_by_hand_skip_an_overflow() -> None:
    loop = Masters(make_task(tiny()), torch.float16, scale=2.0**60)
    before = [weight.detach().clone() for weight in loop.model.parameters()]
    loop.backward()
    loop.update()
    assert all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert loop._scale == 2.0**59


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"width": 10}, "Got width=10. It is divided by four"),
        ({"batch": 1}, "Got batch=1. Batch normalization needs two"),
    ],
)
def test_impossible_tasks_are_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        TaskConfig(**{"name": "gpt", **changes})


def test_a_worker_answers_line_by_line() -> None:
    threads = torch.get_num_threads()
    answers = io.StringIO()
    try:
        job = Job(task=tiny(), way="by hand", level="O0")
        worker.serve(job, io.StringIO("step\nmemory\n"), answers)
    finally:
        torch.set_num_threads(threads)
    seconds, memory = map(json.loads, answers.getvalue().splitlines())
    assert seconds > 0
    assert set(memory) == MEMORY
    assert (memory["weights"], memory["gradients"], memory["masters"]) == (4, 4, 0)
    assert memory["optimizer_state"] == pytest.approx(8, rel=0.1)  # and a few step counters


@pytest.mark.full
def test_a_process_of_its_own_answers() -> None:
    with Worker(Job(task=tiny(), way="torch AdamW", level="O2")) as ours:
        assert ours.step() > 0
        memory = ours.memory()
    assert set(memory) == MEMORY
    assert (memory["weights"], memory["masters"]) == (2, 4)


@pytest.mark.full
def test_a_failing_worker_says_why() -> None:
    job = Job(task=tiny(), way="by hand", level="O9")
    with Worker(job) as failing, pytest.raises(WorkerError, match=re.escape("KeyError: 'O9'")):
        failing.step()


class InPlace:
    """A worker without a process."""

    broken: tuple[str, ...] = ()

    def __init__(self, job: Job) -> None:
        self._way = job.way

    def __enter__(self) -> InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self) -> float:
        if self._way in self.broken:
            raise WorkerError("RuntimeError: no kernel")
        return 1.0

    def memory(self) -> dict[str, float]:
        return dict.fromkeys(MEMORY, 1.0)


def rows_of(level: str, monkeypatch: pytest.MonkeyPatch, *broken: str) -> list[records.Record]:
    monkeypatch.setattr(InPlace, "broken", broken)
    monkeypatch.setattr(train, "Worker", InPlace)
    return train.run_level(tiny(), level, Effort(seconds=0, most=5))


def test_a_level_yields_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("O5", monkeypatch)
    names = ["O5 by hand", train.AUTOCAST, "preamp O5, torch AdamW", "preamp O5, FusedAdam"]
    fields = MEMORY | {
        *("benchmark", "model", "width", "batch", "level", "launches", "name", "group", "status"),
        *(
            "baseline",
            "best",
            "p20",
            "p50",
            "p80",
            "best_ratio",
            "ratio_p20",
            "ratio_p50",
            "ratio_p80",
        ),
        *("rounds", "to_autocast", "to_autocast_p20", "to_autocast_p80"),
        *records.provenance(torch.device("cpu")),
    }
    assert [row["name"] for row in rows] == names
    assert [set(row) for row in rows] == [fields] * 4
    assert {row["baseline"] for row in rows} == {"O5 by hand"}
    assert {row["threads"] for row in rows} == {1}
    assert {row["rounds"] for row in rows} == {2 * train.LAUNCHES}


def test_a_loop_by_hand_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    *done, failed = rows_of("O0", monkeypatch, "by hand")
    assert (failed["name"], failed["status"]) == ("O0 by hand", "not measured")
    assert failed["reason"] == "RuntimeError: no kernel"
    assert [row["baseline"] for row in done] == ["preamp O0, torch AdamW"]


def test_a_loop_with_preamp_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match="no kernel"):
        rows_of("O0", monkeypatch, "torch AdamW")


# -- the GPT and its text ---------------------------------------------------------------------


TEXT = torch.arange(4000, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)


def make(seed: int = 0, **size: int) -> GPT:
    config = ModelConfig(**size) if size else ModelConfig(layers=1, width=16, heads=2, context=8)
    return GPT(config, torch.Generator().manual_seed(seed))


def test_the_usual_model_is_untrained_and_has_a_few_million_parameters() -> None:
    model = make(layers=4)
    assert sum(param.numel() for param in model.parameters()) == 3_307_008
    loss = loss_of(model, windows(TEXT, torch.arange(0, 256, 32), 64)).item()
    assert loss == pytest.approx(math.log(256), rel=0.1)


def test_future_bytes_change_nothing() -> None:
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, 5:] = 200
    before, after = make()(tokens), make()(other)
    assert before.shape == (1, 8, 256)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_written_out_attention_equals_torch_s() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, future), expected)


def test_weights_and_batches_depend_on_the_seed_alone() -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        batches = training_batches(TEXT, steps=3, batch=2, context=8, seed=seed)
        return [*make(seed).parameters(), *(tokens for tokens, _ in batches)]

    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert all(map(torch.equal, first, drawn(0)))
    assert not torch.equal(first[-1], drawn(1)[-1])
    assert not torch.equal(first[0], drawn(1)[0])


def test_the_split_of_the_text_is_pinned() -> None:
    names = ["abc.py", "argparse.py", "ast.py", "asyncio/tasks.py", "typing.py", "zipfile.py"]
    assert [name for name in names if is_held_out(name)] == ["ast.py"]
    training, held_out = read_text()
    assert len(training) > 5 * len(held_out) > 1_000_000


def test_targets_are_the_bytes_after_the_inputs() -> None:
    inputs, targets = windows(TEXT, torch.tensor([0, 5]), 4)
    assert inputs.tolist() == [TEXT[0:4].tolist(), TEXT[5:9].tolist()]
    assert targets.tolist() == [TEXT[1:5].tolist(), TEXT[6:10].tolist()]


def test_held_out_windows_span_the_text_and_come_in_full_number() -> None:
    text = torch.arange(101, dtype=torch.uint8)
    batches = list(held_out_batches(text, count=5, batch=2, context=20))
    assert [len(inputs) for inputs, _ in batches] == [2, 2, 1]
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 100
