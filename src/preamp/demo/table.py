# SPDX-License-Identifier: BSD-3-Clause
"""The one table of a run and notes on its rows, as text for terminal and report alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from preamp.demo.parallel import agreement_of
from preamp.demo.records import DemoResult, LevelResult, ratio
from preamp.kernels import cpu_lacks_matmul

MISSING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One cell."""

    value: str  # the measurement
    detail: str = ""  # its parts, or its ratio to O0; may be empty


MakeCell = Callable[[LevelResult, LevelResult | None], Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column."""

    title: str  # heading
    unit: str  # second line of the heading; may be empty
    is_number: bool  # whether to align to the right
    # Makes the cell of a row; the second argument is the row of O0, if there is one.
    cell: MakeCell


def columns_of(result: DemoResult) -> tuple[Column, ...]:
    """The columns that a run can fill, the level first; peak memory only if it was counted."""
    has_peak = any(row.peak_bytes is not None for row in result.levels)
    return tuple(column for column in _COLUMNS if has_peak or column.title != "peak")


RANK_COLUMNS = ("level", "rank", "median ms", "B/param", "peak MiB", "skipped", "loss scale")


def rank_rows(result: DemoResult) -> list[list[str]]:
    """What each rank says, as text cells below `RANK_COLUMNS`; empty for a run of one process."""
    return [
        [
            row.level,
            str(rank.rank),
            _text(rank.median_seconds, format_seconds),
            _text(rank.bytes_per_parameter, "{:.1f}".format),
            _text(rank.peak_bytes, lambda size: f"{size / 2**20:,.1f}"),
            str(rank.steps_skipped),
            f"{rank.loss_scale:,.6g}",
        ]
        for row in result.levels
        for rank in row.ranks
    ]


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return MISSING if value is None else form(value)


def format_seconds(seconds: float) -> str:
    """Milliseconds with three significant digits, such as ``"7.12"``, ``"71.2"`` or ``"712"``."""
    milliseconds = 1000 * seconds
    digits = max(0, 2 - math.floor(math.log10(milliseconds))) if milliseconds > 0 else 0
    return f"{milliseconds:.{digits}f}"


def _level(row: LevelResult, _base: LevelResult | None) -> Cell:
    return Cell(value=row.level, detail="" if row.status == "finished" else row.status)


def _formats(row: LevelResult, _base: LevelResult | None) -> Cell:
    if row.dtypes is None:
        return Cell(value=MISSING)
    masters = "no" if row.dtypes.masters == "none" else row.dtypes.masters
    return Cell(value=f"{row.dtypes.weights} / {row.dtypes.compute}", detail=f"{masters} masters")


def _held_out(row: LevelResult, base: LevelResult | None) -> Cell:
    if row.held_out_bits is None:
        return Cell(value=MISSING)
    relative = ratio(row.held_out_bits, base and base.held_out_bits)
    detail = "" if relative is None else f"{100 * (relative - 1):+.2f} %"
    return Cell(value=f"{row.held_out_bits:.3f}", detail=detail)


def _seconds(value: float | None, base: float | None) -> Cell:
    if value is None:
        return Cell(value=MISSING)
    return Cell(value=format_seconds(value), detail=_times(ratio(value, base)))


def _compared(name: str, spell: Callable[[Any, Any], Cell]) -> MakeCell:
    """A measurement, beside that of O0."""
    return lambda row, base: spell(getattr(row, name), base and getattr(base, name))


def _speed(row: LevelResult, _base: LevelResult | None) -> Cell:
    speed = row.tokens_per_second
    return Cell(value=MISSING if speed is None else f"{speed:,.0f}")


def _memory(row: LevelResult, _base: LevelResult | None) -> Cell:
    memory = row.memory
    if memory is None:
        return Cell(value=MISSING)
    parts = (memory.weights, memory.masters, memory.gradients, memory.optimizer_state)
    return Cell(value=f"{memory.total:.1f}", detail="+".join(f"{part:.3g}" for part in parts))


def _mebibytes(value: int | None, base: int | None) -> Cell:
    if value is None:
        return Cell(value=MISSING)
    return Cell(value=f"{value / 2**20:,.1f}", detail=_times(ratio(value, base)))


def _scale(row: LevelResult, _base: LevelResult | None) -> Cell:
    return Cell(value=f"{row.loss_scale:,.6g}")


def _skipped(row: LevelResult, _base: LevelResult | None) -> Cell:
    return Cell(value=str(row.steps_skipped), detail=f"of {row.steps_done}")


def _times(value: float | None) -> str:
    return "" if value is None else f"×{value:.2f}"


_COLUMNS = (
    Column(title="level", unit="", is_number=False, cell=_level),
    Column(title="weights / compute", unit="", is_number=False, cell=_formats),
    Column(title="held-out", unit="bits/byte", is_number=True, cell=_held_out),
    Column(title="best", unit="ms", is_number=True, cell=_compared("best_seconds", _seconds)),
    Column(title="median", unit="ms", is_number=True, cell=_compared("median_seconds", _seconds)),
    Column(title="speed", unit="tokens/s", is_number=True, cell=_speed),
    Column(title="memory", unit="B/param", is_number=True, cell=_memory),
    Column(
        title="kept", unit="MiB", is_number=True, cell=_compared("activation_bytes", _mebibytes)
    ),
    Column(title="peak", unit="MiB", is_number=True, cell=_compared("peak_bytes", _mebibytes)),
    Column(title="loss", unit="scale", is_number=True, cell=_scale),
    Column(title="skipped", unit="steps", is_number=True, cell=_skipped),
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

TIMING = (
    "Times are of whole training steps, the first ones left out, one level after the other."
    " Other work on the machine disturbs the median more than the best."
)

MEMORY = (
    "Bytes per parameter are weights + masters + gradients + optimizer state, counted from the"
    " tensors that exist between a backward and its step. Kept MiB are what one forward keeps for"
    " its backward, O1's and O4's half copies of the weights included."
)

HELD_OUT = (
    "Held-out bits per byte are measured on source files that the training never saw: 8.0 knows"
    " nothing, lower is better."
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
    if row.ranks:
        parts.append(agreement_of(row.ranks, result.config.parallel))
    return " ".join(part for part in parts if part)
