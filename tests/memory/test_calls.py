# SPDX-License-Identifier: BSD-3-Clause
"""Factories named in text: read as literals, never run."""

from __future__ import annotations

import pytest
from torch import nn

from preamp.memory.optimizers import Call, parse_call


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AdamW", Call(module="", name="AdamW")),
        (" torch.nn:Linear ", Call(module="torch.nn", name="Linear")),
        ("a.b:C.make", Call(module="a.b", name="C.make")),
        ("m:f()", Call(module="m", name="f")),
        (
            "m:f(1, -2.5, 'x:y(', lr=1e-3, betas=(0.9, 0.99), flag=None)",
            Call(
                module="m",
                name="f",
                args=(1, -2.5, "x:y("),
                kwargs={"lr": 1e-3, "betas": (0.9, 0.99), "flag": None},
            ),
        ),
    ],
)
def test_it_is_read(text: str, expected: Call) -> None:
    assert parse_call(text) == expected


def test_it_is_imported() -> None:
    assert parse_call("torch.nn:Linear(2, 3)").import_function() is nn.Linear


@pytest.mark.parametrize(
    "text",
    [
        "",
        "m:",
        "a b:c",
        "m:f(",
        "m:f(1",
        "m:f(1))",
        "m:f(x)",
        "m:f(open('x'))",
        "m:f(**{})",
        "m:f(1)(2)",
        "m:f(1).g",
        "m:f;g()",
        "m:f(1) + f(2)",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not name a factory.*package\.module:name"):
        parse_call(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nowhere:f", "No module named"),
        ("torch.nn:Linea", "Linea"),
        ("math:pi", "cannot be called"),
    ],
)
def test_what_cannot_be_imported_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        parse_call(text).import_function()
