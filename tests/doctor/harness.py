# SPDX-License-Identifier: BSD-3-Clause
"""Scripts run under the doctor in this process."""

from pathlib import Path
from typing import Any

import torch

from preamp.doctor import Examination, Finding, Place, select_rules
from preamp.engine.block import Block
from preamp.scaling import LossScaler

HERE = "# <-"
"""Marks the line of a script that a finding must name."""


def examine(
    text: str, folder: Path, *, steps: int | None = None, select: tuple[str, ...] = ()
) -> tuple[Examination, dict[str, Any]]:
    """Run ``text`` as a file in ``folder``; return the examination and the script's globals."""
    path = folder / "script.py"
    path.write_text(text, "utf-8")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    examination = Examination(select_rules(select), steps=steps)
    with examination.watching():
        exec(compile(text, str(path), "exec"), names)
    return examination, names


def marked_line(text: str) -> int:
    """The line that carries the mark."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if HERE in line]
    assert len(lines) == 1
    return lines[0]


def where(finding: Finding) -> tuple[str, int]:
    assert isinstance(finding.where, Place)
    return Path(finding.where.file).name, finding.where.line


# -- beside a plain run ---------------------------------------------------------------------------

WATCHED = (
    torch,
    torch.autograd,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.CosineAnnealingWarmRestarts,
    torch.amp.GradScaler,
    torch.Tensor,
    Block,
    LossScaler,
)


def attributes() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(owner).items()} for owner in WATCHED]


def weights(names: dict[str, Any]) -> list[torch.Tensor]:
    model = names["model"]
    return [tensor.clone() for tensor in model.state_dict().values()]


def plain(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "plain.py", "exec"), names)
    return names


def examine_beside(text: str, folder: Path) -> Examination:
    """As `examine`; weights, random numbers and torch are those of a plain run."""
    expected = plain(text)
    before, state = attributes(), torch.get_rng_state()
    examination, names = examine(text, folder)
    if "model" in expected:
        for one, other in zip(weights(names), weights(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), state)
    if "amp.initialize" not in text:
        assert attributes() == before
    return examination
