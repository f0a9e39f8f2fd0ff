# SPDX-License-Identifier: BSD-3-Clause
"""The page: complete, escaped, accessible, small, and written all or not at all."""

import builtins
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases import records as made
from cases.selection import examples
from kit.refusals import assert_approved, assert_refused, refused
from preamp.numerics import History, Record, ResumeRecord, read_history, to_json
from preamp.report import render, write
from preamp.report.gather import gather
from report.pages import Outline, check_accessible, check_stands_alone


def full() -> list[Record]:
    return made.named("blocks.0.attention.weight")


@pytest.mark.parametrize("records", [full(), [], [made.step(1)], [made.look(1)]])
def test_page_is_accessible_whatever_is_recorded(records: list[Record]) -> None:
    check_accessible(render(records))
    check_accessible(render({"a": records, "b": full(), "c": []}))


def test_page_refers_to_nothing_outside_itself() -> None:
    check_stands_alone(render(full()))


@pytest.mark.parametrize("name", made.HOSTILE, ids=range(len(made.HOSTILE)))
def test_hostile_names_are_text(name: str) -> None:
    calm = Outline(render({"run": made.named("cal.m"), "other": made.named("cal.m")}))
    text = render({f"{name}1": made.named(name), f"{name}2": made.named(name)}, title=name)
    page = check_accessible(text)
    text.encode("utf-8")
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in calm.elements} | {"p"}
    assert not [a for _, a in page.elements if any(n.startswith("on") for n in a)]
    assert len(text) < 10**6
    body = text[text.index("<header>") :]
    if "\u202e" in name or "\x00" in name:
        assert not {"\u202e", "\u2066", "\x00", "\x1b"} & set(body)


def looks(*changes: dict[str, dict[str, Any]], policy: Any = None) -> list[Record]:
    """A look in each step: tensors by name, with what is special about each."""
    start = made.start(**({} if policy is None else {"policy": policy}))
    seen = [
        made.look(n, *(made.tensor(name, **how) for name, how in tensors.items()))
        for n, tensors in enumerate(changes, 1)
    ]
    return [start, *seen]


def in_turn(*layers: tuple[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Ten looks, in which a layer has what a function of their number says."""
    return [{name: how(number) for name, how in layers} for number in range(1, 11)]


BY_TWO = [made.step(4, skipped=True, optimizer=index) for index in (0, 1)]
CAUSES = [made.overflow(4, f"{index}.weight", optimizer=index) for index in (0, 1)]
SLOW = [made.start(opt_level="O0"), *(made.step(n, 2.0) for n in range(1, 5))]
PAGES: dict[str, Any] = {
    "all that is recorded": full(),
    "steps alone": [made.start(), made.step(1)],
    "nothing at all": [],
    "two runs": {"fast": full(), "slow": SLOW},
    "skips of two optimizers at one step": [*BY_TWO, *CAUSES],
    "an overflow that was not skipped": [
        made.step(1),
        made.step(2),
        made.overflow(2, "b.weight", was_skipped=False),
    ],
    "many skips": [
        *(made.step(n, skipped=True) for n in range(1, 5001)),
        *(made.overflow(n, f"p{n % 50}") for n in range(1, 5001)),
    ],
    "layers in trouble first": looks(
        *in_turn(
            ("a.weight", lambda n: {"below_normal": n, "nonfinite": n == 2}),
            ("a.bias", lambda n: {}),
            ("b.weight", lambda n: {"below_normal": 50 * (n == 7), "zeros": n}),
        )
    ),
    "layers broken or near at a static scale first": looks(
        *in_turn(
            ("near.weight", lambda n: {"headroom": 0.5 * n, "max_abs": 46341.0}),
            ("over.weight", lambda n: {"nonfinite": n - 1}),
            ("calm.weight", lambda n: {}),
        ),
        policy={"loss_scale": "128.0"},
    ),
    "weights stalled in the latest look": [
        *looks({"b.w": {"below_normal": 1}}),
        made.look(1, made.tensor("a.w"), made.tensor("a.w", what="weight", stalled=90)),
        made.look(2, made.tensor("a.w"), made.tensor("a.w", what="weight", stalled=10)),
    ],
    "gradients that are not finite": looks(
        {"a.weight": {"zeros": 10, "nonfinite": 90}, "b.weight": {}}
    ),
    "underflow is a share of what is not zero": looks(
        {"a.weight": {"zeros": 50, "below_normal": 20, "below_subnormal": 10}}
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_says(name: str) -> None:
    text = render(PAGES[name])
    words = "".join(Outline(text[text.index("<body") :].replace("</html>", "")).words)
    assert_approved("report", name, " ".join(words.split()))


def test_of_many_layers_the_first_are_listed() -> None:
    layers = {f"b.{number}.weight": {"zeros": number} for number in range(61)}
    assert "The first 60 of 61 layers" in render(looks(layers))


def test_runs_are_linked_and_may_have_a_title() -> None:
    text = render({"fast": full(), "slow": SLOW}, title="Two runs")
    assert "<h1>Two runs</h1>" in text
    assert 'href="#run1"' in text
    assert_refused("report", "no run", lambda: render({}))


def test_history_and_its_file_make_the_same_page(tmp_path: Path) -> None:
    history = History(tmp_path / "run.jsonl")
    for record in [*(made.step(n, 1 / n) for n in range(1, 9)), ResumeRecord(step=4)]:
        history.add(record)
    history.add(made.step(5, 7.0))
    from_file = read_history(tmp_path / "run.jsonl")
    assert [step.step for step in gather(from_file).steps] == [1, 2, 3, 4, 5]
    assert render(history) == render(from_file)


def test_write_replaces_the_file_or_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "report.html"
    assert write(path, full()) == path
    before = path.read_text(encoding="utf-8")
    assert before == render(full())
    path.chmod(0o640)
    write(path, [made.step(1)])
    assert path.stat().st_mode & 0o777 == 0o640
    changed = path.read_text(encoding="utf-8")
    assert changed != before

    def fail(*_args: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write(path, full())
    assert path.read_text(encoding="utf-8") == changed
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["without jinja2", "without matplotlib"])
def test_what_is_not_installed_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = name.removeprefix("without ")
    load = builtins.__import__

    def refuse(module: str, *args: Any, **rest: Any) -> Any:
        if module.partition(".")[0] == missing:
            raise ImportError(module)
        return load(module, *args, **rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with refused("report", name):
        render([made.step(1), made.step(2, scales={0: 1.0})])


def test_infinite_and_odd_numbers_do_not_stop_the_page(tmp_path: Path) -> None:
    odd: list[Record] = [
        made.step(1, math.inf, scales={0: math.inf, 1: 0.0}),
        made.step(2, -math.inf, scales={0: math.nan}),
        made.overflow(2, old_scale=math.inf, new_scale=0.0),
        made.overflow(3, parameters=[]),
        made.look(2, made.tensor(elements=0, headroom=None, histogram={200: 1}, scale=math.inf)),
    ]
    check_accessible(render(odd))
    lines = "".join(json.dumps(to_json(record)) + "\n" for record in odd)
    (tmp_path / "run.jsonl").write_text(lines, encoding="utf-8")
    check_accessible(render(read_history(tmp_path / "run.jsonl")))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.floats(width=64), st.floats(min_value=0.0, width=64)), max_size=4))
@example([(1e308, 1e308), (-1e308, 5e-324)])
@example([(1.7e308, 1.7e308), (5e-324, 1.0)])
def test_no_loss_and_no_scale_stops_the_page(values: list[tuple[float, float]]) -> None:
    render([made.step(n, loss, scales={0: scale}) for n, (loss, scale) in enumerate(values, 1)])
