# SPDX-License-Identifier: BSD-3-Clause
"""Loops by hand train as preamp's do; workers answer; a level yields complete rows."""

import io
import json

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import preamp
from preamp.kernels import cpu_lacks_matmul
from preamp_bench import records, train, worker
from preamp_bench.gpt import GPT, ModelConfig, attend
from preamp_bench.harness import Effort
from preamp_bench.loops import BY_HAND, SETTINGS, Masters, make_loop
from preamp_bench.tasks import TASKS, TaskConfig, make_task
from preamp_bench.text import is_held_out, read_text
from preamp_bench.worker import Job

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


# -- the GPT and its text ---------------------------------------------------------------------


TEXT = torch.arange(4000, dtype=torch.int64).mul(7).remainder(251).to(torch.uint8)


def make(seed: int = 0, **size: int) -> GPT:
    config = ModelConfig(**size) if size else ModelConfig(layers=1, width=16, heads=2, context=8)
    return GPT(config, torch.Generator().manual_seed(seed))


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


def test_the_split_of_the_text_is_pinned() -> None:
    names = ["abc.py", "argparse.py", "ast.py", "asyncio/tasks.py", "typing.py", "zipfile.py"]
    assert [name for name in names if is_held_out(name)] == ["ast.py"]
    training, held_out = read_text()
    assert len(training) > 5 * len(held_out) > 1_000_000
