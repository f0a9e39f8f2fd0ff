# SPDX-License-Identifier: BSD-3-Clause
"""Which frames of a traceback a command shows."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest

from preamp.cli.run import own_part


def function_in(module: str, code: str) -> Callable[..., None]:
    """Define ``f`` in a module of this name, and in a file of the same name."""
    names = vars(ModuleType(module))
    exec(compile(f"def f(*given):\n    {code}\n", module, "exec"), names)
    return names["f"]


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
    """These modules call each other, and the last one raises."""
    *outer, last = modules
    functions = [function_in(module, "given[0](*given[1:])") for module in outer]
    functions.append(function_in(last, "raise KeyError"))
    first, *others = functions
    with pytest.raises(KeyError) as caught:
        partial(first, *others)()
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_next is not None
    script = functions[modules.index("train")] if "train" in modules else function_in("none", "1")
    part = own_part(caught.value.__traceback__.tb_next, script.__code__)
    assert [frame.filename for frame in traceback.extract_tb(part)] == wanted
