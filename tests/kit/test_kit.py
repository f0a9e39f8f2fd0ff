# SPDX-License-Identifier: BSD-3-Clause
"""The kit itself: what it refuses, and what it sees."""

import re
from pathlib import Path

import pytest
import torch

from kit import refusals
from kit.compare import differences, picture
from kit.refusals import refused
from kit.run import PLAIN, Run, act, assert_same_program


@act
def nudge(run: Run, by: float = 1.0) -> None:
    with torch.no_grad():
        run.model.last.bias.add_(by)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("stp", r"No act is 'stp'; there are .*backward, .*step, .*zero\."),
        ("loss", "No act is 'loss'"),
        ("step 1", r"'step 1': too many positional arguments; step takes \(\)"),
        ("clip hard", "'clip hard': could not convert string to float: 'hard'; clip takes"),
        ("backward 0 dely", "'dely' is none of inf, delay, late; backward takes"),
        ("iterate 0 1.5", r"iterate takes \(\*indices: int\)"),
    ],
)
def test_what_no_act_can_do_fails_before_the_first(act: str, told: str) -> None:
    run = Run(PLAIN)
    before = picture(run.model)
    with pytest.raises(ValueError, match=told):
        run.play("nudge", f"nudge 2; {act}")
    assert run.log == []
    assert differences(before, picture(run.model)) == []


def test_acts_are_done_in_order_with_their_arguments() -> None:
    run = Run(PLAIN).play("nudge; nudge .5;; backward 3", "step; zero")
    assert run.log == ["nudge", "nudge .5", "backward 3", "step", "zero"]
    assert run.model.first.weight.grad is None


def test_names_and_options_of_runs_are_known() -> None:
    with pytest.raises(KeyError):
        Run(model="Nett")
    with pytest.raises(AttributeError, match="FusedAdm"):
        Run(optimizer="FusedAdm")
    with pytest.raises(TypeError, match="scales"):
        Run(scales=1.0)


def test_programs_that_differ_say_where_first() -> None:
    assert_same_program("iterate | iterate 1", Run(PLAIN), Run("O0"), Run(PLAIN))
    told = r"after nudge 1e-3; iterate 1\nmodels/0/\S+: tensor"
    with pytest.raises(AssertionError, match=told):
        assert_same_program("iterate 1", Run(PLAIN), Run(PLAIN).play("nudge 1e-3"))


def test_refusals_of_other_words_or_that_change_something_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "book.txt").write_text("a | ValueError: {what} is […], or\\nnot\n")
    monkeypatch.setattr(refusals, "BOOKS", tmp_path)
    run = Run(PLAIN)

    def act(error: Exception, name: str = "a", changes: bool = False) -> None:
        with refused("book", name, run.model, what="x"):
            run.play("nudge" if changes else "")
            raise error

    act(ValueError("x is this, or\nnot"))
    for others in (ValueError("x is this"), KeyError("x is this, or\nnot"), ValueError("")):
        with pytest.raises(AssertionError, match=r"'a' has to say\nValueError: x is \[…\], or"):
            act(others)
    with pytest.raises(AssertionError, match=r"If that is better.* is\nb \| ValueError: new"):
        act(ValueError("new"), "b")
    with pytest.raises(AssertionError):
        act(ValueError("x is this, or\nnot"), changes=True)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), refused("book", "a"):
        pass


def test_pictures_see_what_initialize_changes() -> None:
    run = Run("O2", "Adam", starts=False)
    run.loss().backward()
    run.play("step")
    before = picture(run.model, run.optimizer)
    run.initialize()
    changed = {*differences(before, picture(run.model, run.optimizer))}
    assert {"0.first._parameters", "0.first.weight.grad", "1.step", "1.group0.params"} <= changed
    run.close()
    Run("O1")
    assert {"torch.mm", "torch.exp"} & {*differences(before, picture())}


def test_the_examples_of_contributing_run() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
    examples = re.findall(r"```python\ndef (test_\w+)(.*?)```", page, re.DOTALL)
    assert len(examples) == 3
    for name, rest in examples:
        known = dict(globals())
        exec(f"def {name}{rest}", known)
        known[name]()
