# SPDX-License-Identifier: BSD-3-Clause
"""What is cast, told: ``verbosity=2`` line by line, and the audit by counts, bytes and lines."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp

HALVES = {"O1": (torch.float16, "Half"), "O4": (torch.bfloat16, "BFloat16")}
Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    return lambda: capsys.readouterr().out.splitlines()


def _initialize(model: nn.Module, level: str, lines: Lines, **options: Any) -> nn.Module:
    settings = {"verbosity": 2, "scope": "thread", **options}
    model = preamp.initialize(model, opt_level=level, **settings)
    lines()  # the decisions
    return model


@pytest.mark.parametrize("level", HALVES)
def test_every_cast_is_printed(level: str, lines: Lines) -> None:
    dtype, name = HALVES[level]
    model = _initialize(nn.Linear(4, 2), level, lines)
    half = model(torch.ones(3, 4))
    assert lines() == [f"Float->{name} (linear)"] * 3  # input, weight, bias
    F.softmax(half, -1)
    assert lines() == [f"{name}->Float (softmax)"]
    torch.ones(3, 2, dtype=dtype) + torch.ones(3, 2)
    assert lines() == [f"{name}->Float (__add__)"]
    torch.add(torch.ones(2), torch.ones(2, dtype=dtype))
    assert lines() == [f"{name}->Float (add)"]
    F.cross_entropy(torch.ones(3, 2, dtype=dtype), torch.zeros(3, dtype=torch.int64))
    assert lines() == [f"{name}->Float (cross_entropy)"]
    torch.cat([torch.ones(1), torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype)])
    assert lines() == [f"{name}->Float (cat)"] * 2


def test_model_scope_prints_inside_the_model_only(lines: Lines) -> None:
    model = _initialize(nn.Linear(4, 2), "O1", lines, scope="model")
    F.softmax(torch.ones(2, 2, dtype=torch.half), -1)
    outside = lines()
    model(torch.ones(3, 4))
    assert outside == []
    assert lines() == ["Float->Half (linear)"] * 3


def test_printing_ends_with_the_engine_that_asked(lines: Lines) -> None:
    quiet = preamp.initialize(nn.Linear(4, 2), opt_level="O4", scope="thread", verbosity=0)
    quiet_exp = torch.exp
    half = torch.ones(1, dtype=torch.bfloat16)
    torch.exp(half)
    assert lines() == []
    loud = _initialize(nn.Linear(4, 2), "O4", lines)
    torch.exp(half)
    assert lines() == ["BFloat16->Float (exp)"]
    preamp.engine_of(loud).close()
    torch.exp(half)
    assert lines() == []
    assert torch.exp.__wrapped__ is quiet_exp.__wrapped__
    preamp.engine_of(quiet).close()


def test_lines_come_from_the_first_rank_only(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    _model = _initialize(nn.Linear(4, 2), "O1", lines)  # the casts end with it
    monkeypatch.setattr("preamp.core.log.is_first_rank", lambda: False)
    torch.exp(torch.ones(1, dtype=torch.half))
    assert lines() == []


# -- the audit --------------------------------------------------------------------------------


def _line(marker: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        lines = [n for n, text in enumerate(file, 1) if text.rstrip().endswith(f"# {marker}")]
    return f":{lines[0]}"


@pytest.mark.parametrize(("level", "half"), [("O1", "float16"), ("O4", "bfloat16")])
def test_counts_bytes_and_lines(level: str, half: str) -> None:
    model = preamp.initialize(nn.Linear(4, 2), opt_level=level, scope="thread", verbosity=0)
    model(torch.ones(5, 4))  # the first loads torch's compiler, which in 2.6 multiplies tensors
    with preamp.audit_casts() as casts:
        for _ in range(3):
            out = model(torch.ones(5, 4))  # call of the model
        F.softmax(out, -1)  # softmax
        assert casts == []  # filled when the block ends

    linear, softmax = casts
    assert (linear.function, linear.source, linear.target) == ("linear", "float32", half)
    assert linear.calls == 9  # input, weight, bias
    assert linear.bytes == 3 * (5 * 4 + 2 * 4 + 2) * (4 + 2)
    assert linear.where.endswith("test_reports.py" + _line("call of the model"))
    assert (softmax.function, softmax.source, softmax.target) == ("softmax", half, "float32")
    assert (softmax.calls, softmax.bytes) == (1, 5 * 2 * (2 + 4))
    assert softmax.where.endswith("test_reports.py" + _line("softmax"))


def test_audit_ends_with_its_block_also_when_that_raises() -> None:
    model = preamp.initialize(nn.Linear(4, 2), opt_level="O1", verbosity=0)
    with pytest.raises(ZeroDivisionError), preamp.audit_casts() as casts:
        raise ZeroDivisionError
    model(torch.ones(1, 4))
    assert casts == []


def test_two_audits_and_two_threads() -> None:
    model = preamp.initialize(nn.Linear(4, 2), opt_level="O1", verbosity=0)
    with preamp.audit_casts() as outer:
        with preamp.audit_casts() as inner:
            thread = threading.Thread(target=model, args=(torch.ones(1, 4),))
            thread.start()
            thread.join()
        model(torch.ones(1, 4))
    assert sum(cast.calls for cast in inner) == 3
    assert sum(cast.calls for cast in outer) == 6
