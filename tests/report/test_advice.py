# SPDX-License-Identifier: BSD-3-Clause
"""Each rule speaks where it should, with the right number, and is silent where it should be."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from cases import records as made
from preamp.numerics import Float32Record, Record
from preamp.report import render
from preamp.report.advice import advise, judge
from preamp.report.finding import RULES, Finding, Verdict
from preamp.report.gather import gather
from report.planted import FAULTY, HEALTHY, Case, train

STEPS = [made.step(n, 1 / n) for n in range(1, 101)]
CALM: list[Record] = [made.start(), *STEPS]
LATE = [made.step(n, 9.0) for n in range(101, 120)]
TAKEN = made.look(1, made.tensor(nonfinite=3, max_abs=5e4))


def skipping(steps: range, **changes: Any) -> list[Record]:
    skipped = [made.step(n, skipped=n in steps, **changes) for n in range(1, 101)]
    return [made.start(), *skipped]


CASES: dict[str, tuple[list[Record], str, list[Record]]] = {
    "weights-not-finite": (
        [*CALM, made.look(9, made.tensor(what="weight", nonfinite=3))],
        "3 values at the latest look, the first in fc.weight.",
        [*CALM, made.look(9, made.tensor(nonfinite=3))],
    ),
    "loss-not-finite": (
        [*CALM, made.step(101, math.nan), made.overflow(7, loss_was_finite=False)],
        "In 2 steps from 7 on, 1 of them skipped. It was 0.167 at step 6.",
        [*CALM, made.overflow(7)],
    ),
    "overflow-in-one-place": (
        [*CALM, *(made.overflow(n) for n in (10, 20, 30)), made.overflow(40, "other")],
        "It came first in 3 of 4 skipped steps, at loss scales of 2¹⁶.",
        [
            made.start(),
            *(made.step(n, skipped=n < 9) for n in range(1, 50)),
            *(made.overflow(n) for n in range(1, 9)),
        ],
    ),
    "many-skips": (
        [made.start(), *(made.step(n, skipped=n % 4 == 0) for n in range(1, 101))],
        "25 of 100 steps: 25 %.",
        [made.start(), *(made.step(n, skipped=n in (1, 2, 3, 50, 99)) for n in range(1, 101))],
    ),
    "skips-in-a-row": (
        skipping(range(40, 52)),
        "12 steps in a row, up to step 51.",
        skipping(range(40, 51)),
    ),
    "no-step-taken": (
        [made.start(), *(made.step(n, skipped=True) for n in range(1, 4))],
        "3 steps, all of them skipped.",
        [made.start(), *(made.step(n, skipped=n < 3) for n in range(1, 4))],
    ),
    "gradients-all-zero": (
        [
            made.start(policy={"loss_scale": "1.0"}),
            *(made.look(n, made.tensor(zeros=100 * (n > 1), scale=1.0)) for n in (1, 5, 9)),
        ],
        "1 gradient had no value other than zero in 2 looks, the latest at step 9, at a loss scale",
        [*CALM, made.look(1, made.tensor(zeros=100)), made.look(2, made.tensor(zeros=99))],
    ),
    "overflow-at-any-scale": (
        [*CALM, *(made.overflow(n, old_scale=2.0 ** (4 - n), kinds=["inf"]) for n in range(1, 7))],
        "In 6 skipped steps, at every scale from 8 down to 2⁻².",
        [*CALM, *(made.overflow(n, old_scale=2.0 ** (9 - n)) for n in range(1, 7))],
    ),
    "diverges": (
        [*CALM, *(made.step(n, 9.0) for n in range(101, 120))],
        "Loss 0 went from 1 to 9.",
        [*CALM, *(made.step(n, 3.3) for n in range(101, 120))],
    ),
    "loss-rises": (
        [*CALM, *LATE, made.look(9, made.tensor()), made.look(119, made.tensor(rms=1.4))],
        "Loss 0 went from 1 to 9.",
        [*CALM, *LATE, made.look(9, made.tensor()), made.look(119, made.tensor(rms=1.6))],
    ),
    "overflow-taken": (
        [made.start(policy={"loss_scale": "1024.0"}), made.step(1), TAKEN, made.step(2, math.nan)],
        "1 gradient held infinite or nan values at step 1, and the step was taken all the same. The"
        " loss is not finite from step 2 on.",
        [made.start(), made.step(1), TAKEN],
    ),
    "gradients-lost": (
        [*CALM, made.look(9, made.tensor(below_subnormal=11, headroom=4.5))],
        "11 % of the values in fc.weight are lost at a loss scale of 2¹⁶.",
        [*CALM, made.look(9, made.tensor(below_subnormal=10))],
    ),
    "updates-stalled": (
        [*CALM, made.look(9, made.tensor(what="weight", stalled=31))],
        "31 % of the half weights stayed",
        [
            made.start(policy={"loss_scale": "dynamic", "master_weights": "True"}),
            made.look(9, made.tensor(what="weight", stalled=31)),
        ],
    ),
    "little-headroom": (
        [*CALM, made.look(9, made.tensor(what="weight", max_abs=5e4, headroom=0.4))],
        "The weight fc.weight reaches 5e+04, 0.4 powers of two below it.",
        [*CALM, made.look(9, made.tensor(headroom=0.4))],  # a gradient; its scale is dynamic
    ),
}


def found(records: list[Record], rule: str) -> list[Finding]:
    return [finding for finding in advise(gather(records)) if finding.id == rule]


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)


@pytest.mark.parametrize("rule", CASES)
def test_rule_speaks_with_its_number(rule: str) -> None:
    records, number, _ = CASES[rule]
    (finding,) = found(records, rule)
    assert number in finding.number.replace("\u00a0", " ")
    assert "{" not in finding.title + finding.number + finding.do


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_silent_where_nothing_is_wrong(rule: str) -> None:
    assert found(CASES[rule][2], rule) == []


LOOK = made.look(9, made.tensor())


def verdict_of(*records: Record) -> Verdict:
    run = gather(records)
    return judge(run, advise(run))


def test_a_calm_run_that_was_looked_at_has_nothing_to_report() -> None:
    verdict = verdict_of(*CALM, LOOK)
    assert (verdict.kind, verdict.title) == ("good", "Nothing to report")
    assert verdict.text == "100 steps, none of them skipped. The loss went from 1 to 0.01."


@pytest.mark.parametrize(
    ("records", "title"),
    [
        (CALM, "Nothing found, but tensors were not recorded"),
        ([made.start(), made.step(1, losses={}), LOOK], "Nothing found, but losses were not"),
        ([made.start(), made.step(1, losses={})], "Nothing found, but losses and tensors were"),
    ],
)
def test_a_verdict_on_what_was_not_recorded_is_not_green(records: list[Record], title: str) -> None:
    verdict = verdict_of(*records)
    assert verdict.kind == "empty"
    assert verdict.title.startswith(title)
    assert "judged" in verdict.text
    page = render({"one": records, "other": [*CALM, LOOK]})
    assert f'<div class="verdict empty">\n<p class="says"><bdi>{title}' in page
    assert page.count("Nothing to report") == 2  # the verdict, and the table


def test_float32_has_nothing_that_had_to_be_looked_at() -> None:
    assert verdict_of(made.start(opt_level="O0"), *STEPS).kind == "good"


@pytest.mark.parametrize("pattern", ["S", "SSSS", "TSTS", "STTSS", "SSSSST", "TTTSTTTSTTTSTTTT"])
def test_few_steps_of_which_many_were_skipped_are_not_green(pattern: str) -> None:
    steps = [made.step(n, skipped=letter == "S") for n, letter in enumerate(pattern, 1)]
    assert verdict_of(made.start(), *steps, LOOK).kind != "good"


@pytest.mark.parametrize("pattern", ["T", "ST", "STT", "TTTTSTTT", "SSST" + 40 * "T" + "STTSTT"])
def test_the_skips_that_a_scale_takes_are_green(pattern: str) -> None:
    steps = [made.step(n, skipped=letter == "S") for n, letter in enumerate(pattern, 1)]
    assert verdict_of(made.start(), *steps, LOOK).kind == "good"


def test_each_optimizer_is_judged_by_its_own_steps() -> None:
    steps = [made.step(n, skipped=bool(o), optimizer=o) for n in range(1, 20) for o in (0, 1)]
    (finding,) = advise(gather([made.start(), *steps, LOOK]))
    assert finding.id == "no-step-taken"
    assert finding.number == "19 steps of optimizer 1, all of them skipped."


@pytest.mark.parametrize("losses", [(2.0, 3.0, 1e9), (2.0, 2.0, 2.0, 8.1), (-1.0, -1.0, 5.0)])
def test_a_loss_that_went_up_is_not_green(losses: tuple[float, ...]) -> None:
    steps = [made.step(n, loss) for n, loss in enumerate(losses, 1)]
    verdict = verdict_of(made.start(), *steps, LOOK)
    assert verdict.title == f"Training diverges, since step {len(losses)}"


def test_a_verdict_says_since_when_the_loss_is_not_finite() -> None:
    losses = (8.0, math.nan, 7.0, math.nan, math.inf)
    verdict = verdict_of(made.start(), *(made.step(n, x) for n, x in enumerate(losses, 1)))
    assert verdict.kind == "critical"
    assert "from 8 to 7, and is not finite from step 4 on." in verdict.text


def test_gradients_that_grow_under_losses_of_nan_are_no_course_of_a_loss() -> None:
    looks = [made.look(n, made.tensor(rms=size)) for n, size in ((1, 0.01), (2, 9.0))]
    first = advise(gather([made.start(), *(made.step(n, math.nan) for n in (1, 2)), *looks]))[0]
    assert first.line == "The loss is infinite or nan, since step 1"


@pytest.mark.parametrize(("steps", "is_told"), [(10, True), (11, False)])
def test_a_search_that_takes_half_of_a_run_is_told_of(steps: int, is_told: bool) -> None:
    searching = [made.step(n, skipped=n < 6) for n in range(1, steps + 1)]
    said = found([made.start(), *searching], "skips-in-a-row")
    assert [f.number for f in said] == ["5 steps in a row, up to step 5."] * is_told
    assert all(f.do.startswith("The loss scale began too high. Begin at 2¹⁶") for f in said)


@pytest.mark.parametrize(
    ("near", "title"),
    [
        (5e4, "A static loss scale of 2¹⁶ is too large"),
        (9.0, "The backward of a finite loss makes"),
    ],
)
def test_a_static_scale_is_blamed_where_other_gradients_came_near(near: float, title: str) -> None:
    tensors = made.tensor(nonfinite=3, max_abs=9.0), made.tensor("head", max_abs=near)
    start, seen = made.start(policy={"loss_scale": "65536.0"}), made.look(2, *tensors)
    records = [start, made.step(1), made.step(2), seen, made.step(3, math.nan)]
    finding = advise(gather(records))[0]
    assert finding.title.startswith(title)
    assert (finding.step, finding.where) == (2, "gradient of fc.weight")
    assert finding.number == (
        "1 gradient held infinite or nan values at step 2, and the step was taken all the same. The"
        " loss is not finite from step 3 on."
    )
    finding = advise(gather([*records[:3], records[4]]))[0]  # nothing was looked at
    assert finding.line == "The loss is infinite or nan, since step 3"


@pytest.mark.parametrize(("loss", "title"), [(1.0, "The backward of a fin"), (math.nan, "The lo")])
def test_gradients_are_blamed_only_where_their_loss_was_finite(loss: float, title: str) -> None:
    """A critic breaks at its step 2, before the generator's loss of step 2 does."""
    critic = [made.step(n, losses={1: loss if n > 1 else 1.0}, optimizer=1) for n in (1, 2)]
    seen = replace(made.look(2, made.tensor("c.weight", nonfinite=1)), loss_id=1, optimizer=1)
    records = [made.start(policy={"loss_scale": "1.0"}), made.step(1), *critic, seen]
    finding = advise(gather([*records, made.step(2, math.nan)]))[0]
    assert finding.line.startswith(title)
    assert ("c.weight" in finding.where) == (loss == 1.0)


@pytest.mark.parametrize(
    ("phase", "title", "where"),
    [
        ("forward", "The forward of body.2 makes inf", "forward of body.2 (body.2), in sqrt at mo"),
        (
            "data",
            "What body.2 is given holds inf",
            "data that came into body.2 (body.2), in sqrt at model.py:12",
        ),
        ("given", "What body.2 is given holds inf", "what was given to body.2 (body.2)"),
        ("weight", "A weight that body.2 uses holds inf", "weight that was given to body.2"),
        ("input cast", "The data become inf in float16", "cast of what came into body.2 (body.2)"),
        (
            "output cast",
            "The output of body.2 becomes inf in float16",
            "cast of the output of body",
        ),
    ],
)
def test_advice_names_what_a_trace_found(phase: str, title: str, where: str) -> None:
    told: Any = {"phase": phase, "operation": "sqrt", "where": "model.py:12"}
    trace = replace(made.trace("body.2"), **told)
    seen = made.overflow(7, loss_was_finite=False, trace=trace)
    (finding,) = found([*CALM, seen], "loss-not-finite")
    assert (finding.line, finding.where[: len(where)]) == (f"{title}, since step 7", where)
    assert "overflow=" not in finding.do


@pytest.mark.parametrize(("kind", "helps"), [("finite", True), ("inf", False), ("nan", False)])
def test_float32_is_advised_where_it_was_not_tried_in_vain(kind: Any, helps: bool) -> None:
    what_if = Float32Record(found=kind, max_abs=1.5e5 if helps else None)
    trace = replace(made.trace("body.2"), float32=what_if)
    seen = made.overflow(7, loss_was_finite=False, trace=trace)
    (finding,) = found([*CALM, seen], "loss-not-finite")
    assert what_if.told("float16") in finding.number
    assert ("keep_fp32" in finding.do) == helps
    assert what_if.told("float16").split("; ")[0] in render([*CALM, seen])


def test_an_overflow_that_was_not_skipped_is_no_skipped_step() -> None:
    taken = made.overflow(2, "b.weight", kinds=["inf"], was_skipped=False)
    records = [made.start(policy={"loss_scale": "1024.0"}), made.step(1), made.step(2), taken]
    for later in ([], [made.step(3, math.nan)]):
        (finding,) = advise(gather([*records, *later]))
        assert finding.line == "A static loss scale of 2¹⁰ is too large, since step 2"
        assert finding.where == "gradient of b.weight"
        assert ("not finite from step 3" in finding.number) == bool(later)
    assert "The overflow" in render(records)


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (lambda n: None, "If a schedule of the learning rate goes on at each step, call preamp.s"),
        (lambda n: 1 / n, "The schedule of the learning rate went on after 25 skipped steps: call"),
        (lambda n: 0.1, ""),
        (lambda n: 1 / (n - (n - 1) // 4), ""),  # what preamp.step_scheduler makes of 1 / n
    ],
)
def test_advice_on_skips_names_step_scheduler_where_it_helps(
    rate: Callable[[int], float | None], words: str
) -> None:
    steps = [made.step(n, skipped=n % 4 == 0, lr=rate(n)) for n in range(1, 102)]
    (finding,) = found([made.start(), *steps], "many-skips")
    assert words in finding.do
    assert ("preamp.step_scheduler(scheduler, optimizer)" in finding.do) == bool(words)


@pytest.mark.parametrize("level", preamp.OPT_LEVELS)
def test_what_is_advised_for_a_loss_that_is_not_finite_is_accepted(level: str) -> None:
    (finding,) = found([made.step(1, math.nan)], "loss-not-finite")
    assert 'pass overflow="trace" to preamp.initialize' in finding.do
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = preamp.initialize(
        *(model, optimizer, True, level), overflow="trace", verbosity=0
    )
    preamp.engine_of(optimizer).close()


@pytest.mark.parametrize(("every", "is_told"), [(2000, False), (40, True)])
def test_the_skips_of_a_growing_scale_are_no_fault_of_where_they_begin(
    every: int, is_told: bool
) -> None:
    steps = [made.step(n, skipped=n % every == 0) for n in range(1, 10 * every)]
    overflows = [made.overflow(n) for n in range(every, 10 * every, every)]
    assert bool(found([made.start(), *steps, *overflows], "overflow-in-one-place")) == is_told


@pytest.mark.parametrize(("first", "is_told"), [(17.0, True), (1e6, False)])
def test_a_loss_that_explodes_in_its_first_steps(first: float, is_told: bool) -> None:
    """No calm losses come before, and the scale falls until the loss itself is nan."""
    losses = [first, 1.1 * first, *[6e7, 8e7, 5e7] * 7, math.nan]
    steps = [made.step(n, loss, skipped=n > 2) for n, loss in enumerate(losses, 1)]
    overflows = [made.overflow(n, old_scale=2.0 ** (19 - n)) for n in range(3, 24)]
    told = advise(gather([made.start(), *steps, *overflows]))[0]
    expected = "Training diverges, since step 3"
    assert (told.line == expected) == is_told


def test_a_wild_run_with_a_good_end_is_told_of() -> None:
    losses = [1.0] * 10 + [50.0, 90.0, 70.0] * 20 + [0.5] * 5
    steps = [made.step(n, loss) for n, loss in enumerate(losses, 1)]
    assert verdict_of(made.start(), *steps, LOOK).title == "Training diverges, since step 11"


@pytest.mark.parametrize(
    ("losses", "zeros", "is_told"),
    [
        ((1.0, 0.5, 0.01, 0.0, 0.0), (0, 0, 0, 100, 100), False),  # all is learnt
        ((1.0, 0.9, 0.9, 0.0, 0.0), (0, 0, 0, 100, 100), True),  # a factor of zero
        ((1.0, 0.5, 0.01, 0.1, 0.1), (0, 0, 0, 100, 100), True),
        ((1.0, 0.5, 0.3, 0.3, 0.3), (0, 0, 0, 0, 100), False),  # one batch
    ],
)
def test_gradients_of_a_loss_that_came_down_to_zero_may_be_zero(
    losses: tuple[float, ...], zeros: tuple[int, ...], is_told: bool
) -> None:
    steps = [made.step(n, loss) for n, loss in enumerate(losses, 1)]
    looks = [made.look(n, made.tensor(zeros=count)) for n, count in enumerate(zeros, 1)]
    assert bool(found([made.start(), *steps, *looks], "gradients-all-zero")) == is_told


@pytest.mark.parametrize(("headroom", "words"), [(4.5, "8 times as large"), (1.5, "only 1.5")])
def test_advice_on_the_scale_depends_on_the_room_there_is(headroom: float, words: str) -> None:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=headroom))
    (finding,) = found([*CALM, seen], "gradients-lost")
    assert words in finding.do


def test_a_scale_at_its_ceiling_is_told_where_gradients_are_lost() -> None:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=4.5))
    top = [made.step(n, scales={0: 2.0**24}) for n in range(4)]
    policy = {"loss_scale": "dynamic", "max_loss_scale": str(2.0**24)}
    (finding,) = found([made.start(policy=policy), *top, seen], "gradients-lost")
    assert finding.do.endswith("8 times as large. It is at its ceiling: raise max_loss_scale.")


def test_o0_loses_nothing_to_a_half_format() -> None:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=0.1))
    assert advise(gather([made.start(opt_level="O0"), *STEPS, seen])) == []


def test_a_verdict_names_the_worst() -> None:
    run = gather(CASES["loss-not-finite"][0])
    verdict = judge(run, advise(run))
    assert verdict.kind == "critical"
    assert verdict.title == "The loss is infinite or nan, since step 7"
    run = gather(CASES["updates-stalled"][0])
    assert judge(run, advise(run)).title == "Updates round to nothing, since step 9"
    assert verdict_of(*CASES["loss-rises"][0]).title == "Nothing to worry about, 1 note"
    assert judge(gather([]), []).kind == "empty"


def test_skips_before_the_first_step_are_a_scale_being_found() -> None:
    run = gather(skipping(range(1, 9)))
    assert "while the loss scale was being found" in judge(run, advise(run)).text


def test_names_with_braces_stay_as_they_are() -> None:
    records = [*CALM, *(made.overflow(n, "{0}{x}") for n in (10, 20, 30))]
    (finding,) = found(records, "overflow-in-one-place")
    assert "{0}{x}" in finding.title


@pytest.mark.parametrize(
    ("floor", "last", "is_told"),
    [
        ({}, 1.0, True),
        ({}, 2.0, False),
        ({"min_loss_scale": "128.0"}, 128.0, True),
        ({"min_loss_scale": "128.0"}, 256.0, False),
        ({"min_loss_scale": "0.5"}, 1.0, True),
    ],
)
def test_an_overflow_at_the_floor_itself_is_at_any_scale(
    floor: dict[str, str], last: float, is_told: bool
) -> None:
    """No smaller scale will come."""
    scales = [last * 4, last * 2, last]
    records = [*CALM, *(made.overflow(n, old_scale=by) for n, by in enumerate(scales, 1))]
    records[0] = made.start(policy={"loss_scale": "dynamic", **floor})
    assert bool(found(records, "overflow-at-any-scale")) == is_told


def test_a_run_that_overflows_at_its_floor_is_told_so() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(
        model, optimizer, opt_level="O2", min_loss_scale=2.0**14, numerics="light", verbosity=0
    )
    for _ in range(3):  # the third at the floor
        with preamp.scale_loss(model(torch.ones(1, 2)).sum() * 1e30, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    engine = preamp.engine_of(optimizer)
    (finding,) = found(list(engine.history), "overflow-at-any-scale")
    assert "down to 2¹⁴" in finding.number.replace("\u00a0", " ")
    engine.close()


@pytest.mark.parametrize("kind", ["LayerNorm", "Attention"])
def test_a_number_to_add_is_not_advised_where_there_is_an_eps(kind: str) -> None:
    trace = replace(made.trace("norm"), type=kind, phase="backward", operation="", where="")
    nan = [made.overflow(n, old_scale=1.0, trace=trace) for n in (10, 20, 30)]
    (finding,) = found([*CALM, *nan], "overflow-at-any-scale")
    assert ("add a small number" in finding.do) == (kind == "Attention")


def test_keep_fp32_is_not_advised_where_it_did_not_help() -> None:
    seen = made.overflow(7, loss_was_finite=False, trace=made.trace("body.2"))
    kept = made.start(policy={"loss_scale": "dynamic", "keep_fp32": "'body.2'"})
    assert "keep_fp32=" in found([*CALM, seen], "loss-not-finite")[0].do
    assert "keep_fp32 of body.2 did not" in found([kept, *STEPS, seen], "loss-not-finite")[0].do


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
