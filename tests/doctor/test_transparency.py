# SPDX-License-Identifier: BSD-3-Clause
"""A run under the doctor computes the same, ends the same, and leaves torch as it was."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from doctor.cases import BF16, BUGS, FLOAT32, GRAD_SCALER, O1
from doctor.harness import attributes, examine, plain, weights
from preamp.doctor import Examination, select_rules
from preamp.doctor.detector import Detector
from preamp.doctor.rules.loss_scale import Stepping

pytestmark = [
    pytest.mark.usefixtures("alias"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


def test_an_exception_goes_through_and_findings_stay(tmp_path: Path) -> None:
    text = BUGS["clipping without unscale_"].text + "\nraise KeyboardInterrupt\n"
    before, examination = attributes(), Examination(select_rules())
    with pytest.raises(KeyboardInterrupt), examination.watching():
        exec(compile(text, str(tmp_path / "s.py"), "exec"), {"__name__": "__main__"})
    assert [finding.rule.id for finding in examination.findings] == ["PA101"]
    assert attributes() == before


@pytest.mark.parametrize("text", [GRAD_SCALER, O1, BF16], ids=["GradScaler", "O1", "bf16"])
def test_the_run_ends_after_the_steps_asked_for(text: str, tmp_path: Path) -> None:
    examination, names = examine(text.replace("range(4)", "range(10**9)"), tmp_path, steps=2)
    assert examination.seen.steps == 2
    assert names["step"] == 1


def test_a_script_that_swallows_everything_is_stopped_again(tmp_path: Path) -> None:
    body = FLOAT32.replace(
        "    optimizer.step()\n",
        "    try:\n        optimizer.step()\n    except BaseException:\n        caught = step\n",
    )
    examination, names = examine(body + "optimizer.step()\nnever = 1\n", tmp_path, steps=3)
    assert names["caught"] == 3
    assert "never" not in names
    assert examination.seen.steps == 5


def test_generators_are_clipped(tmp_path: Path) -> None:
    clip = "nn.utils.clip_grad_norm_((p for p in model.parameters()), 1e-3)"
    text = GRAD_SCALER.replace("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", clip)
    expected = weights(plain(text))
    got = weights(examine(text, tmp_path)[1])
    assert all(map(torch.equal, got, expected))


def test_a_failing_detector_does_not_touch_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(self: Detector, optimizer: torch.optim.Optimizer) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Stepping, "step_begins", fail)
    examination, names = examine(FLOAT32, tmp_path)
    assert names["step"] == 3
    assert len(examination.notes) == 1
    assert examination.notes[0].startswith("PA102, PA103: the doctor itself failed (ValueError: a")


def test_compiled_models_run_compiled(tmp_path: Path) -> None:
    text = FLOAT32.replace(
        "optimizer = ", "whole, model = model, torch.compile(model, backend='eager')\noptimizer = "
    )
    expected = plain(text)["whole"].state_dict()
    examination, names = examine(text, tmp_path)
    assert all(torch.equal(names["whole"].state_dict()[name], expected[name]) for name in expected)
    assert examination.findings == []
    assert [note[:32] for note in examination.notes] == ["The script uses torch.compile. F"]


def test_a_missing_layer_of_a_compiled_model(tmp_path: Path) -> None:
    text = BUGS["a missing layer"].text.replace(
        "optimizer = ", "model.compile(backend='eager')\noptimizer = "
    )
    examination, _ = examine(text, tmp_path)
    assert [finding.rule.id for finding in examination.findings] == ["PA401"]


class _Looks(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", [0, 1])
def test_modes_of_the_script_stay_in_order(number: int, tmp_path: Path) -> None:
    """One that is on around a single step neither ends the doctor's nor is ended by it."""
    lines = FLOAT32.splitlines()
    start = lines.index("for step in range(4):")
    body = [f"    {line}" for line in lines[start + 1 :]]
    text = "\n".join(
        [*lines[: start + 1], f"    with Mode() if step == {number} else nullcontext():", *body]
    )
    text = f"from contextlib import nullcontext\n{text}\n"
    names: dict[str, Any] = {"__name__": "__main__", "Mode": _Looks}
    examination = Examination(select_rules())
    with examination.watching():
        exec(compile(text, str(tmp_path / "s.py"), "exec"), names)
    assert examination.seen.steps == 4
    x = torch.ones(2)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert x.sum() == 2


def test_writes_to_lists_are_counted_in_the_second_step(tmp_path: Path) -> None:
    """Below a mode torch does not count them; who relies on the count must not notice."""
    line = "    versions.append([p.grad._version for p in model.parameters()])\n"
    text = FLOAT32.replace("for step", "versions = []\nfor step").replace(
        "    optimizer.step()\n",
        f"    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)\n{line}"
        f"    optimizer.step()\n",
    )
    expected = plain(text)["versions"]
    assert expected == [[1] * 6] * 4
    assert examine(text, tmp_path)[1]["versions"] == expected


def test_a_fork_is_not_watched(tmp_path: Path) -> None:
    text = FLOAT32 + (
        "import os\nchild = os.fork()\nif child == 0:\n"
        "    optimizer.step()\n    os._exit(7)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, which torch has started
        examination, names = examine(text, tmp_path)
    assert names["status"] == 7
    assert examination.seen.steps == 4


def test_training_in_a_thread(tmp_path: Path) -> None:
    lines = GRAD_SCALER.splitlines()
    start = lines.index("for step in range(4):")
    body = [f"    {line}" for line in lines[start:]]
    run = ["import threading", "thread = threading.Thread(target=train)"]
    ends = ["thread.start()", "thread.join()"]
    text = "\n".join([*lines[:start], "def train():", *body, *run, *ends])
    examination, _ = examine(text, tmp_path)
    assert examination.seen.steps == 4
    assert examination.findings == []
    assert examination.notes == []


@pytest.mark.parametrize("text", [FLOAT32, BUGS["a region around the loop"].text], ids=len)
def test_models_and_optimizers_are_not_kept_alive(text: str, tmp_path: Path) -> None:
    examination, names = examine(text, tmp_path)
    names.clear()
    assert not list(examination.seen.optimizers)
    assert not list(examination.seen.roots)


def test_modules_still_work_where_nothing_is_a_tensor(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self) -> None:
            return None

    with Examination(select_rules()).watching():
        assert Odd()() is None


def test_the_scale_of_a_scaler_is_not_read_in_each_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host waits for it; a script that scales by hand may know it without."""
    read: list[int] = []
    get_scale = torch.amp.GradScaler.get_scale

    def counted(scaler: torch.amp.GradScaler) -> float:
        read.append(1)
        return get_scale(scaler)

    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", counted)
    examination, _ = examine(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
        "scaler.scale(torch.ones(()))\n"
        "for _ in range(200):\n"
        "    loss = model(torch.ones(2, 4)).square().mean()\n"
        "    (loss * 1024.0).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
        "    optimizer.zero_grad()\n",
        tmp_path,
    )
    assert not examination.findings
    assert 64 <= len(read) < 140  # once in each of the first 64 backwards, and at the first step
