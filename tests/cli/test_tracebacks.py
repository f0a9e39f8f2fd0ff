# SPDX-License-Identifier: BSD-3-Clause
"""Which frames of a traceback a command shows."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType

import pytest

from preamp.cli.tracebacks import part_of


def function_in(module: str, code: str) -> Callable[..., None]:
    """Define ``f`` in a module of this name, and in a file of the same name."""
    names = vars(ModuleType(module))
    exec(compile(f"def f(*given):\n    {code}\n", module, "exec"), names)
    return names["f"]


def is_script(frame: FrameType) -> bool:
    return frame.f_globals["__name__"] == "train"


def shown(error: type[BaseException], *modules: str) -> list[str] | None:
    """Whose frames are shown where these modules call each other, and the last one raises."""
    *outer, last = modules
    call = partial(function_in(last, "raise given[0]"), error)
    for module in reversed(outer):
        call = partial(function_in(module, "given[0]()"), call)
    with pytest.raises(error) as caught:
        call()
    assert caught.value.__traceback__ is not None
    part = part_of(caught.value.__traceback__.tb_next, is_script, caught.value)
    return None if part is None else [frame.filename for frame in traceback.extract_tb(part)]


RUN, DOCTOR, TORCH = "preamp.cli.run", "preamp.doctor.probes", "torch.nn.modules"


@pytest.mark.parametrize(
    ("modules", "wanted"),
    [
        (("__main__", RUN, "train"), ["train"]),
        ((RUN, "train", "helper"), ["train", "helper"]),
        ((RUN, "train", TORCH, DOCTOR, "model"), ["train", TORCH, "model"]),
        ((RUN, "train", TORCH), ["train", TORCH]),
        ((RUN, "train", "preamp.engine.core"), ["train", "preamp.engine.core"]),
        ((RUN, "train", DOCTOR), ["train", DOCTOR]),
        ((RUN, DOCTOR, TORCH), [RUN, DOCTOR, TORCH]),
    ],
    ids=[
        "the script",
        "what it imports",
        "its model",
        "torch",
        "a refusal",
        "a bug of the doctor",
        "nothing of the script",
    ],
)
def test_the_script_is_shown_without_the_command(
    modules: tuple[str, ...], wanted: list[str]
) -> None:
    assert shown(KeyError, *modules) == wanted


def test_a_syntax_error_of_the_script_names_its_own_place() -> None:
    assert shown(SyntaxError, RUN, "importlib._bootstrap") is None
    assert shown(SyntaxError, RUN, "train", "importlib._bootstrap") == [
        "train",
        "importlib._bootstrap",
    ]
