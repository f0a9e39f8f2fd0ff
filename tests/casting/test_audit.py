# SPDX-License-Identifier: BSD-3-Clause
"""The cast audit: counts, bytes and lines of what O1 and O4 cast."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from preamp.casting.functions import CAST_REPORTS


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
    assert linear.where.endswith("test_audit.py" + _line("call of the model"))
    assert (softmax.function, softmax.source, softmax.target) == ("softmax", half, "float32")
    assert (softmax.calls, softmax.bytes) == (1, 5 * 2 * (2 + 4))
    assert softmax.where.endswith("test_audit.py" + _line("softmax"))


def test_nothing_is_counted_outside_or_without_casts() -> None:
    model = preamp.initialize(nn.Linear(4, 2), opt_level="O1", scope="thread", verbosity=0)
    with preamp.audit_casts() as casts:
        with preamp.disable_casts():
            F.softmax(torch.ones(2, dtype=torch.half), -1)
        torch.ones(2) + 1
    model(torch.ones(1, 4))
    assert casts == []


def test_audit_ends_with_its_block_also_when_that_raises() -> None:
    was_installed = CAST_REPORTS.is_installed
    before = torch.nn.functional.softmax
    audit = preamp.audit_casts()
    with pytest.raises(ZeroDivisionError), audit:
        raise ZeroDivisionError
    assert CAST_REPORTS.is_installed is was_installed
    assert torch.nn.functional.softmax is before


def test_audit_prints_nothing_and_printing_needs_no_audit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = preamp.initialize(nn.Linear(4, 2), opt_level="O1", verbosity=0)
    with preamp.audit_casts():
        quiet(torch.ones(1, 4))
    assert capsys.readouterr().out == ""
    loud = preamp.initialize(nn.Linear(4, 2), opt_level="O1", verbosity=2)
    capsys.readouterr()
    with preamp.audit_casts() as casts:
        loud(torch.ones(1, 4))
    assert capsys.readouterr().out.splitlines() == ["Float->Half (linear)"] * 3
    assert sum(cast.calls for cast in casts) == 3


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


def test_numbers_are_the_same_under_an_audit() -> None:
    torch.manual_seed(0)
    model = preamp.initialize(nn.Linear(16, 8), opt_level="O1", verbosity=0)
    x = torch.randn(3, 16)
    plain = model(x)
    with preamp.audit_casts():
        audited = model(x)
    assert torch.equal(plain, audited)
