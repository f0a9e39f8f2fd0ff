# SPDX-License-Identifier: BSD-3-Clause
"""What is advised on a run, and the verdict on it, are what ``approved/advice.txt`` has."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import preamp
from cases import records as made
from kit.refusals import assert_approved
from kit.run import Run
from preamp.numerics import Float32Record, Record
from preamp.report import render
from preamp.report.advice import advise, judge
from preamp.report.finding import RULES
from preamp.report.gather import gather
from report.planted import FAULTY, HEALTHY, Case, train

STEPS = [made.step(n, 1 / n) for n in range(1, 101)]
CALM: list[Record] = [made.start(), *STEPS]
LATE = [made.step(n, 9.0) for n in range(101, 120)]
TAKEN = made.look(1, made.tensor(nonfinite=3, max_abs=5e4))
LOOK = made.look(9, made.tensor())
STATIC = made.start(policy={"loss_scale": "65536.0"})
NO_LOSS = [made.start(), made.step(1, losses={})]


def advice_on(records: list[Record]) -> str:
    """The verdict, and of each finding all but what is to be done, which the first one says."""
    run = gather(records)
    findings = advise(run)
    verdict = judge(run, findings)
    told = [f"{f.id}, {f.line}. {f.where}. {f.number}" for f in findings]
    told[:1] = [f"{told[0]} {findings[0].do}"] if told else []
    said = " / ".join([f"{verdict.kind}: {verdict.title}. {verdict.text}", *told])
    assert "{" not in said.replace("{0}{x}", "")
    return said.replace("\u00a0", " ")


# -- runs of which a test says what was recorded ---------------------------------------------------


def run_of(*losses: float) -> list[Record]:
    return [made.start(), *(made.step(n, loss) for n, loss in enumerate(losses, 1))]


def skipping(steps: range, count: int = 100) -> list[Record]:
    return [made.start(), *(made.step(n, skipped=n in steps) for n in range(1, count + 1))]


def pattern(letters: str) -> list[Record]:
    """Steps that are skipped or taken, as a pattern of S and T says."""
    steps = [made.step(n, skipped=letter == "S") for n, letter in enumerate(letters, 1)]
    return [made.start(), *steps, LOOK]


def scheduled(rate: Callable[[int], float | None]) -> list[Record]:
    """Each fourth step is skipped."""
    steps = [made.step(n, skipped=n % 4 == 0, lr=rate(n)) for n in range(1, 102)]
    return [made.start(), *steps]


def in_one_place(every: int) -> list[Record]:
    numbers = range(every, 10 * every, every)
    steps = [made.step(n, skipped=n in numbers) for n in range(1, 10 * every)]
    return [made.start(), *steps, *(made.overflow(n) for n in numbers)]


def traced(phase: str = "forward", start: Record | None = None, **changes: Any) -> list[Record]:
    """A loss that is not finite, and the trace of it."""
    told: Any = {"phase": phase, "operation": "sqrt", "where": "model.py:12", **changes}
    trace = replace(made.trace("body.2"), **told)
    seen = made.overflow(7, loss_was_finite=False, trace=trace)
    return [start or made.start(), *STEPS, seen]


def in_float32(kind: Any, max_abs: float | None = None) -> list[Record]:
    """What a trace found is told of float32 as well."""
    return traced(float32=Float32Record(found=kind, max_abs=max_abs))


def of_nan(kind: str) -> list[Record]:
    told: Any = {"type": kind, "phase": "backward", "operation": "", "where": ""}
    trace = replace(made.trace("norm"), **told)
    return [*CALM, *(made.overflow(n, old_scale=1.0, trace=trace) for n in (10, 20, 30))]


def with_zeros(losses: tuple[float, ...], zeros: tuple[int, ...]) -> list[Record]:
    looks = [made.look(n, made.tensor(zeros=count)) for n, count in enumerate(zeros, 1)]
    return [*run_of(*losses), *looks]


def falling_to(last: float, **floor: str) -> list[Record]:
    overflows = [made.overflow(n, old_scale=last * by) for n, by in enumerate((4, 2, 1), 1)]
    return [made.start(policy={"loss_scale": "dynamic", **floor}), *STEPS, *overflows]


def lossy(headroom: float, *before: Record) -> list[Record]:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=headroom))
    return [*(before or CALM), seen]


def near(largest: float) -> list[Record]:
    """A gradient is not finite at a static scale, and another one reached so far."""
    tensors = made.tensor(nonfinite=3, max_abs=9.0), made.tensor("head", max_abs=largest)
    return [STATIC, made.step(1), made.step(2), made.look(2, *tensors), made.step(3, math.nan)]


def critic(loss: float) -> list[Record]:
    """It breaks at its step 2, before the generator's loss of step 2 does."""
    steps = [made.step(n, losses={1: loss if n > 1 else 1.0}, optimizer=1) for n in (1, 2)]
    seen = replace(made.look(2, made.tensor("c.weight", nonfinite=1)), loss_id=1, optimizer=1)
    return [STATIC, made.step(1), *steps, seen, made.step(2, math.nan)]


def exploding(first: float) -> list[Record]:
    """No calm losses come before, and the scale falls until the loss itself is nan."""
    losses = [first, 1.1 * first, *[6e7, 8e7, 5e7] * 7, math.nan]
    steps = [made.step(n, loss, skipped=n > 2) for n, loss in enumerate(losses, 1)]
    overflows = [made.overflow(n, old_scale=2.0 ** (19 - n)) for n in range(3, 24)]
    return [made.start(), *steps, *overflows]


def taken(*later: Record) -> list[Record]:
    overflow = made.overflow(2, "b.weight", kinds=["inf"], was_skipped=False)
    start = made.start(policy={"loss_scale": "1024.0"})
    return [start, made.step(1), made.step(2), overflow, *later]


CASES: dict[str, tuple[list[Record], list[Record]]] = {  # by rule: where it speaks, and not
    "weights-not-finite": (
        [*CALM, made.look(9, made.tensor(what="weight", nonfinite=3))],
        [*CALM, made.look(9, made.tensor(nonfinite=3))],
    ),
    "loss-not-finite": (
        [*CALM, made.step(101, math.nan), made.overflow(7, loss_was_finite=False)],
        [*CALM, made.overflow(7)],
    ),
    "overflow-in-one-place": (
        [*CALM, *(made.overflow(n) for n in (10, 20, 30)), made.overflow(40, "other")],
        [
            made.start(),
            *(made.step(n, skipped=n < 9) for n in range(1, 50)),
            *(made.overflow(n) for n in range(1, 9)),
        ],
    ),
    "many-skips": (
        [made.start(), *(made.step(n, skipped=n % 4 == 0) for n in range(1, 101))],
        [made.start(), *(made.step(n, skipped=n in (1, 2, 3, 50, 99)) for n in range(1, 101))],
    ),
    "skips-in-a-row": (skipping(range(40, 52)), skipping(range(40, 51))),
    "no-step-taken": (
        [made.start(), *(made.step(n, skipped=True) for n in range(1, 4))],
        [made.start(), *(made.step(n, skipped=n < 3) for n in range(1, 4))],
    ),
    "gradients-all-zero": (
        [
            made.start(policy={"loss_scale": "1.0"}),
            *(made.look(n, made.tensor(zeros=100 * (n > 1), scale=1.0)) for n in (1, 5, 9)),
        ],
        [*CALM, made.look(1, made.tensor(zeros=100)), made.look(2, made.tensor(zeros=99))],
    ),
    "overflow-at-any-scale": (
        [*CALM, *(made.overflow(n, old_scale=2.0 ** (4 - n), kinds=["inf"]) for n in range(1, 7))],
        [*CALM, *(made.overflow(n, old_scale=2.0 ** (9 - n)) for n in range(1, 7))],
    ),
    "diverges": (
        [*CALM, *(made.step(n, 9.0) for n in range(101, 120))],
        [*CALM, *(made.step(n, 3.3) for n in range(101, 120))],
    ),
    "loss-rises": (
        [*CALM, *LATE, made.look(9, made.tensor()), made.look(119, made.tensor(rms=1.4))],
        [*CALM, *LATE, made.look(9, made.tensor()), made.look(119, made.tensor(rms=1.6))],
    ),
    "overflow-taken": (
        [made.start(policy={"loss_scale": "1024.0"}), made.step(1), TAKEN, made.step(2, math.nan)],
        [made.start(), made.step(1), TAKEN],
    ),
    "gradients-lost": (
        [*CALM, made.look(9, made.tensor(below_subnormal=11, headroom=4.5))],
        [*CALM, made.look(9, made.tensor(below_subnormal=10))],
    ),
    "updates-stalled": (
        [*CALM, made.look(9, made.tensor(what="weight", stalled=31))],
        [
            made.start(policy={"loss_scale": "dynamic", "master_weights": "True"}),
            made.look(9, made.tensor(what="weight", stalled=31)),
        ],
    ),
    "little-headroom": (
        [*CALM, made.look(9, made.tensor(what="weight", max_abs=5e4, headroom=0.4))],
        [*CALM, made.look(9, made.tensor(headroom=0.4))],  # a gradient; its scale is dynamic
    ),
}


KEPT = made.start(policy={"loss_scale": "dynamic", "keep_fp32": "'body.2'"})
LEARNT = (1.0, 0.5, 0.01, 0.0, 0.0)
WILD = [1.0] * 10 + [50.0, 90.0, 70.0] * 20 + [0.5] * 5
BRACES = [made.overflow(n, "{0}{x}") for n in (10, 20, 30)]
# fmt: off
MORE: dict[str, list[Record]] = {
    "calm and looked at": [*CALM, LOOK],
    "no tensors": CALM,
    "no losses": [*NO_LOSS, LOOK],
    "neither losses nor tensors": NO_LOSS,
    "nothing": [],
    "float32 without tensors": [made.start(opt_level="O0"), *STEPS],
    "float32 loses nothing": lossy(0.1, made.start(opt_level="O0"), *STEPS),
    "nan in between": run_of(8.0, math.nan, 7.0, math.nan, math.inf),
    "gradients that grow under nan": [
        *run_of(math.nan, math.nan),
        *(made.look(n, made.tensor(rms=size)) for n, size in ((1, 0.01), (2, 9.0)))],
    "wild, with a good end": [*run_of(*WILD), LOOK],
    "a loss that went up": [*run_of(2.0, 3.0, 1e9), LOOK],
    "a loss that went up four times": [*run_of(2.0, 2.0, 2.0, 8.1), LOOK],
    "a loss that went up from below": [*run_of(-1.0, -1.0, 5.0), LOOK],
    "a loss that explodes": exploding(17.0),
    "a loss that was as large": exploding(1e6),
    "skips before the first step": skipping(range(1, 9)),
    "a search that takes half of a run": skipping(range(1, 6), 10),
    "a shorter search": skipping(range(1, 6), 11),
    "each optimizer by its own steps": [
        made.start(),
        *(made.step(n, skipped=bool(o), optimizer=o) for n in range(1, 20) for o in (0, 1)),
        LOOK],
    "skips without rates": scheduled(lambda n: None),
    "skips under a schedule": scheduled(lambda n: 1 / n),
    "skips at one rate": scheduled(lambda n: 0.1),
    "skips that a schedule waits for": scheduled(lambda n: 1 / (n - (n - 1) // 4)),
    "skips of a growing scale": in_one_place(2000),
    "skips that begin in one place": in_one_place(40),
    "names with braces": [*CALM, *BRACES],
    "a trace of a forward": traced(),
    "a trace of data": traced("data"),
    "a trace of what was given": traced("given"),
    "a trace of a weight": traced("weight"),
    "a trace of an input's cast": traced("input cast"),
    "a trace of an output's cast": traced("output cast"),
    "keep_fp32 in vain": traced(start=KEPT),
    "finite in float32": in_float32("finite", 1.5e5),
    "inf in float32": in_float32("inf"),
    "nan in float32": in_float32("nan"),
    "nan of what has an eps": of_nan("LayerNorm"),
    "nan of what has none": of_nan("Attention"),
    "zeros when all is learnt": with_zeros(LEARNT, (0, 0, 0, 100, 100)),
    "zeros by a factor of zero": with_zeros((1.0, 0.9, 0.9, 0.0, 0.0), (0, 0, 0, 100, 100)),
    "zeros of a loss that is none": with_zeros((1.0, 0.5, 0.01, 0.1, 0.1), (0, 0, 0, 100, 100)),
    "zeros of one batch": with_zeros((1.0, 0.5, 0.3, 0.3, 0.3), (0, 0, 0, 0, 100)),
    "room for a larger scale": lossy(4.5),
    "little room for a larger scale": lossy(1.5),
    "a scale at its ceiling": lossy(
        4.5,
        made.start(policy={"loss_scale": "dynamic", "max_loss_scale": str(2.0**24)}),
        *(made.step(n, scales={0: 2.0**24}) for n in range(4))),
    # No smaller scale than the floor will come.
    "overflows down to 1": falling_to(1.0),
    "overflows down to 2": falling_to(2.0),
    "overflows down to a floor": falling_to(128.0, min_loss_scale="128.0"),
    "overflows above a floor": falling_to(256.0, min_loss_scale="128.0"),
    "overflows above a low floor": falling_to(1.0, min_loss_scale="0.5"),
    "others came near the largest": near(5e4),
    "no other came near": near(9.0),
    "nothing was looked at": [*near(9.0)[:3], near(9.0)[4]],
    "a critic of a finite loss": critic(1.0),
    "a critic whose loss is not": critic(math.nan),
    "an overflow that was taken": taken(),
    "an overflow and its end": taken(made.step(3, math.nan)),
}
# fmt: on
MANY = ("S", "SSSS", "TSTS", "STTSS", "SSSSST", "TTTSTTTSTTTSTTTT")
FEW = ("T", "ST", "STT", "TTTTSTTT", "SSST" + 40 * "T" + "STTSTT")


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_what_is_advised(name: str) -> None:
    records, calm = CASES.get(name) or (MORE[name], None)
    assert_approved("advice", name, advice_on(records))
    if calm is not None:
        assert name in [finding.id for finding in advise(gather(records))]
        assert name not in [finding.id for finding in advise(gather(calm))]


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)


@pytest.mark.parametrize("letters", [*MANY, *FEW])
def test_few_steps_of_which_many_were_skipped_are_not_green(letters: str) -> None:
    """And those that a scale takes are."""
    run = gather(pattern(letters))
    assert (judge(run, advise(run)).kind == "good") is (letters in FEW)


def test_the_page_says_the_same() -> None:
    page = render({"one": CALM, "other": [*CALM, LOOK]})
    assert '<div class="verdict empty">\n<p class="says"><bdi>Nothing found, but tensors' in page
    assert page.count("Nothing to report") == 2  # the verdict, and the table
    assert "The overflow" in render(taken())
    for kind in ("finite", "inf", "nan"):
        told = Float32Record(found=kind, max_abs=None).told("float16").split("; ")[0]
        assert told in render(in_float32(kind))


@pytest.mark.parametrize("level", preamp.OPT_LEVELS)
def test_what_is_advised_for_a_loss_that_is_not_finite_is_accepted(level: str) -> None:
    assert 'pass overflow="trace" to preamp.initialize' in advice_on([made.step(1, math.nan)])
    Run(level, overflow="trace")


def test_a_run_that_overflows_at_its_floor_is_told_so() -> None:
    run = Run("O2", min_loss_scale=2.0**14, numerics="light").play(*3 * ["backward 0 inf; step"])
    assert "every scale from 2¹⁶ down to 2¹⁴" in advice_on(list(run.engine.history))


# -- runs that really trained with a planted fault --------------------------------------------


@pytest.mark.parametrize("case", [*FAULTY, *HEALTHY], ids=lambda case: case.name)
def test_a_report_begins_with_what_is_wrong(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = gather(train(case))
    findings = advise(run)
    assert re.fullmatch(case.first, judge(run, findings).title)
    if case in FAULTY:
        first = findings[0]
        assert re.search(case.where, f"{first.title} {first.where} {first.number}")
        assert re.search(case.do, first.do)
    told = " ".join(finding.do for finding in findings)
    assert not case.never or not re.search(case.never, told)
