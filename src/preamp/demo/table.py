# SPDX-License-Identifier: BSD-3-Clause
"""The one table of a run and notes on its rows, as text for terminal and report alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from preamp.core.dtypes import HALF_DTYPES
from preamp.demo.parallel import agreement_of
from preamp.demo.records import DemoResult, LevelResult, ratio
from preamp.engine.storage import MOVED_NOTHING
from preamp.kernels import cpu_lacks_matmul
from preamp.policy import level_defaults

MISSING = "–"


class Cell(NamedTuple):
    """One cell."""

    value: str  # the measurement
    detail: str = ""  # its parts, or its ratio to O0; may be empty


class Column(NamedTuple):
    """One column."""

    title: str  # heading
    unit: str  # second line of the heading; may be empty
    # Makes the cell of a row; the second argument is the row of O0, if there is one.
    cell: Callable[[LevelResult, LevelResult | None], Cell]
    is_number: bool = True  # whether to align to the right


def columns_of(result: DemoResult) -> tuple[Column, ...]:
    """The columns that a run can fill, the level first; peak memory only if it was counted."""
    has_peak = any(row.peak_bytes is not None for row in result.levels)
    return tuple(column for column in _COLUMNS if has_peak or column.title != "peak")


def format_seconds(seconds: float) -> str:
    """Milliseconds with three significant digits, such as ``"7.12"``, ``"71.2"`` or ``"712"``."""
    milliseconds = 1000 * seconds
    digits = max(0, 2 - math.floor(math.log10(milliseconds))) if milliseconds > 0 else 0
    return f"{milliseconds:.{digits}f}"


def _level(row: LevelResult, _base: LevelResult | None) -> Cell:
    return Cell(row.level, "" if row.status == "finished" else row.status)


def _formats(row: LevelResult, _base: LevelResult | None) -> Cell:
    if row.dtypes is None:
        return Cell(MISSING)
    masters = "no" if row.dtypes.masters == "none" else row.dtypes.masters
    return Cell(f"{row.dtypes.weights} / {row.dtypes.compute}", f"{masters} masters")


def _memory(row: LevelResult, _base: LevelResult | None) -> Cell:
    memory = row.memory
    if memory is None:
        return Cell(MISSING)
    parts = (memory.weights, memory.masters, memory.gradients, memory.optimizer_state)
    return Cell(f"{memory.total:.1f}", "+".join(f"{part:.3g}" for part in parts))


def _skipped(row: LevelResult, _base: LevelResult | None) -> Cell:
    return Cell(str(row.steps_skipped), f"of {row.steps_done}")


def _number(
    title: str,
    unit: str,
    name: str,
    form: Callable[[Any], str],
    compared: Callable[[float], str] | None = "×{:.2f}".format,
) -> Column:
    """A column of the measurement ``name``, and how it compares with that of O0."""

    def cell(row: LevelResult, base: LevelResult | None) -> Cell:
        value = getattr(row, name)
        relative = ratio(value, base and getattr(base, name))
        detail = "" if relative is None or compared is None else compared(relative)
        return Cell(MISSING if value is None else form(value), detail)

    return Column(title, unit, cell)


def _percent(relative: float) -> str:
    return f"{100 * (relative - 1):+.2f} %"


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f}"


_COLUMNS = (
    Column("level", "", _level, is_number=False),
    Column("weights / compute", "", _formats, is_number=False),
    _number("held-out", "bits/byte", "held_out_bits", "{:.3f}".format, _percent),
    _number("best", "ms", "best_seconds", format_seconds),
    _number("median", "ms", "median_seconds", format_seconds),
    _number("speed", "tokens/s", "tokens_per_second", "{:,.0f}".format, None),
    Column("memory", "B/param", _memory),
    _number("kept", "MiB", "activation_bytes", _mebibytes),
    _number("peak", "MiB", "peak_bytes", _mebibytes),
    _number("loss", "scale", "loss_scale", "{:,.6g}".format, None),
    Column("skipped", "steps", _skipped),
)


_LEVELS = {
    "O0": "float32 throughout: what the other rows are compared with.",
    "O1": "Weights stay fp32; functions that are safe in fp16 run in it, the others in fp32.",
    "O2": "Weights and gradients are fp16; the optimizer updates fp32 masters.",
    "O3": (
        "May be worse: there are no fp32 masters, so updates below about 1/2000 of a weight are"
        " rounded away; there is no loss scale, so gradients below 3e-8 become zero; and those"
        " below about 1e-3 vanish from Adam's average of squares, which makes its steps too long."
    ),
    "O4": "O1 with bf16, which has fp32's range and needs no loss scale.",
    "O5": "O2 with bf16, which has fp32's range and needs no loss scale.",
}

_STATUS = {
    "diverged": "Diverged: ",
    "refused": "Stopped by the loss scaler: ",
    "interrupted": "Interrupted: ",
}

_TIMING = (
    "Times are of whole training steps, the first ones left out, one level after the other."
    " Other work on the machine disturbs the median more than the best."
)

_MEMORY = (
    "Bytes per parameter are weights + masters + gradients + optimizer state, counted from the"
    " tensors that exist between a backward and its step. Kept MiB are what one forward keeps for"
    " its backward, O1's and O4's half copies of the weights included."
)

_HELD_OUT = (
    "Held-out bits per byte are measured on source files that the training never saw: 8.0 knows"
    " nothing, lower is better."
)

_NOT_CLIPPED = (
    "Nothing was clipped at any level, so that their losses can be compared. Gradients were"
    " applied as they were made where the loss scale is static."
)

_KEPT = "A dynamic loss scale needs all gradients of a step, so they were kept."


def remarks_of(result: DemoResult) -> list[str]:
    """How the numbers of a run were found, and what its storage did not do."""
    kept, on_cpu = result.config.kept, result.device.startswith("cpu")
    remarks = [_HELD_OUT, _TIMING, _MEMORY]
    remarks += [f"{MOVED_NOTHING}."] * (kept.place == "host" and on_cpu)
    return remarks + [_NOT_CLIPPED] * kept.applies_at_once


_WIDE_MOMENTS = (
    "FusedAdam, which other storages than full need, keeps float32 moments beside half weights, 8"
    " bytes; torch's AdamW keeps half ones, 4."
)

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def note_of(row: LevelResult, result: DemoResult) -> str:
    """Say what is special about a row of a run on this machine."""
    parts = [_LEVELS.get(row.level, "")]
    if row.status != "finished":
        end = row.reason.rstrip(".")
        parts.insert(0, f"{_STATUS[row.status]}{end} ({row.steps_done} steps done).")
    compute = "" if row.dtypes is None else row.dtypes.compute
    parts += [
        f"On this CPU preamp multiplies {half} numbers in fp32, so {half} saves no time here."
        for half, dtype in _HALVES.items()
        if half in compute and result.device.startswith("cpu") and cpu_lacks_matmul(dtype)
    ]
    policy = level_defaults(row.level)
    if not policy.master_weights and policy.cast_model_type in HALF_DTYPES:
        has_wide = result.config.storage_at(row.level).moments == "float32"
        parts += [_WIDE_MOMENTS] * (has_wide and result.config.has_fused_optimizer)
    keeps = result.config.kept.release_gradients
    keeps = keeps and not result.config.storage_at(row.level).release_gradients
    parts += [_KEPT] * keeps
    if row.ranks:
        parts.append(agreement_of(row.ranks, result.config.parallel))
    return " ".join(part for part in parts if part)
