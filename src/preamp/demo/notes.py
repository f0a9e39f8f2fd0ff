# SPDX-License-Identifier: BSD-3-Clause
"""What a reader has to know to read a row."""

from __future__ import annotations

from preamp.demo.parallel import agreement_of
from preamp.demo.records import DemoResult, LevelResult

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


def note_of(row: LevelResult, result: DemoResult) -> str:
    """Say what is special about a row."""
    parts = [_LEVELS.get(row.level, "")]
    if row.status != "finished":
        end = row.reason.rstrip(".")
        parts.insert(0, f"{_STATUS[row.status]}{end} ({row.steps_done} steps done).")
    computes_fp16 = row.dtypes is not None and "fp16" in row.dtypes.compute
    if computes_fp16 and result.config.device.startswith("cpu"):
        parts.append("On CPUs preamp multiplies fp16 numbers in fp32, so fp16 saves no time here.")
    if row.ranks:
        parts.append(agreement_of(row.ranks, result.config.parallel))
    return " ".join(part for part in parts if part)
