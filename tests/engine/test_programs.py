# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a script calls in whatever order, it gets what plain torch computes in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cases.levels import BY_NAME, LEVEL_NAMES
from engine.programs import (
    LOSSES,
    NAMES,
    OPTIMIZERS,
    Again,
    Backward,
    Call,
    Checkpoint,
    Clip,
    Freeze,
    Look,
    Read,
    Step,
    Write,
    WriteMasters,
    Zero,
    run,
)

EXAMPLES = 50 if settings.get_current_profile_name() == "quick" else 600
"""Programs for each level; thousands by ``pytest --hypothesis-profile=full``."""

indices, booleans, which = st.integers(0, 5), st.booleans(), st.integers(0, 1)
names = st.sampled_from(NAMES)
rarely = st.sampled_from([False] * 7 + [True])

backwards = st.builds(
    Backward,
    st.sampled_from(["a", "b", "q", "n", "aq", "ab", "aqn", "abqn", "abqn"]),
    indices,
    st.integers(0, LOSSES - 1),
    booleans,
    booleans,
    rarely,
    rarely,
    rarely,
)
steps = st.builds(Step, which)
others = st.one_of(
    st.builds(Step, which, indices),
    st.builds(Zero, st.sampled_from([0, 1, "model"]), booleans),
    st.builds(Zero, st.sampled_from([0, 1, "model"]), booleans),
    st.builds(Zero, names, booleans),
    st.builds(
        Clip,
        which,
        st.sampled_from([2.0**-12, 2.0**-6, 2.0**6, math.inf]),
        st.sampled_from(["preamp", "masters", "model"]),
    ),
    st.builds(Read, names),
    st.builds(Write, names, st.sampled_from(["fill_", "mul_", "data =", "data.fill_"])),
    st.builds(WriteMasters, which, st.sampled_from(["mul_", "copy_", "data ="])),
    st.builds(Freeze, names, booleans),
    st.builds(Look, st.sampled_from(["forward", "deepcopy", "state_dict", "exact_weights"])),
    st.builds(Checkpoint, st.sampled_from(["save", "save", "load", "restart"])),
    st.builds(Again, st.sampled_from(LEVEL_NAMES)),
)
programs = st.lists(st.one_of(backwards, backwards, steps, others, others), max_size=14)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.generate, Phase.shrink],
    print_blob=False,
    report_multiple_bugs=False,
)
@given(data=st.data())
def test_programs_do_what_plain_torch_does(level: str, data: st.DataObject) -> None:
    has_coarse_state = BY_NAME[level].weight is BY_NAME["O3"].weight and level == "O3"
    optimizer = data.draw(st.sampled_from(["SGD"] if has_coarse_state else list(OPTIMIZERS)))
    loss_scale: Any = data.draw(st.sampled_from([None, 1.0, 128.0, "dynamic"]))
    frozen = data.draw(st.sampled_from([(), (), ("b.weight",), ("a.bias", "q")]))
    program: Sequence[Call] = data.draw(programs)
    with warnings.catch_warnings():
        # A program may train at a dynamic scale without any block, of which there is a warning.
        warnings.filterwarnings("ignore", message=".*scale_loss", category=UserWarning)
        run(program, level, optimizer, loss_scale, frozen=frozen)
