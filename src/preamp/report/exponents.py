# SPDX-License-Identifier: BSD-3-Clause
"""Histograms of exponents above the ranges of the number formats."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, inf, log2

from preamp.numerics import FORMATS, NumberFormat, TensorStatistics
from preamp.report import words
from preamp.report.blocks import WITH_NUMERICS, Figure, Gallery, Missing, Section
from preamp.report.chart import Scale
from preamp.report.gather import Run
from preamp.report.svg import Html, coordinate, legend_of, percent, picture, sample, stretched, tag

WORST = 3
LARGEST = 3

_SHORT = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
_BARS = 90.0
_ROW = 13.0
_FOOT = 22.0
_PAD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A tensor whose histogram is shown."""

    tensor: TensorStatistics  # its statistics
    step: int  # when they were taken
    reason: str  # why it was chosen


def choose(run: Run) -> list[Chosen]:
    """Choose tensors with a histogram: those that lose most, then those with largest values."""
    for record in reversed(run.numerics):
        known = [t for t in record.tensors if t.histogram]
        if known:
            break
    else:
        return []
    losing = sorted((t for t in known if t.underflow > 0), key=lambda t: -t.underflow)
    largest = sorted(known, key=lambda t: -t.max_abs / t.scale)
    chosen: dict[tuple[str, str], Chosen] = {}
    for tensors, count, reason in (
        (losing, WORST, "among the largest shares of underflow"),
        (largest, LARGEST, "among the largest values"),
    ):
        new = [t for t in tensors if (t.what, t.name) not in chosen][:count]
        for tensor in new:
            item = Chosen(tensor=tensor, step=record.step, reason=reason)
            chosen[tensor.what, tensor.name] = item
    return list(chosen.values())


def draw(chosen: Chosen, name: str) -> Html:
    """Draw one histogram."""
    tensor = chosen.tensor
    counts = tensor.histogram or {}
    shift = floor(log2(tensor.scale)) if 0 < tensor.scale < inf else 0
    axis = _axis(counts, shift)
    foot = _BARS + 8 + _ROW * len(_SHORT)
    rows = [
        part
        for row, form in enumerate(_SHORT)
        for part in _range(FORMATS[form], axis, _BARS + 8 + _ROW * row, is_own=form == tensor.form)
    ]
    return picture(
        name,
        f"Exponents of {words.shown(tensor.name)}, {tensor.what}",
        _describe(chosen, shift),
        *_labels(axis, foot),
        _bars(counts, axis, shift),
        *rows,
        height=foot + _FOOT,
    )


def caption(chosen: Chosen) -> str:
    """Say what kind of tensor it is and how it lies in its format."""
    tensor = chosen.tensor
    parts = [f"{tensor.what.capitalize()}, {tensor.dtype}, step {chosen.step:,}; {chosen.reason}"]
    parts.append(f"largest {words.magnitude(tensor.max_abs)}")
    if tensor.headroom is not None:
        parts.append(f"headroom in {_short(tensor.form)} {tensor.headroom:.1f} powers of two")
    parts.append(f"{words.share(tensor.underflow)} below its normal range")
    if tensor.scale != 1:
        parts.append(f"loss scale {words.scale(tensor.scale)} on the values")
    return "; ".join(parts) + "."


def _short(form: str) -> str:
    return _SHORT.get(form, form)


def _axis(counts: dict[int, int], shift: int) -> Scale:
    """Cover the values with and without the loss scale, and all of fp16's range."""
    fp16 = FORMATS["float16"]
    low = min(min(counts), min(counts) - shift, fp16.subnormal_exponent) - _PAD
    high = max(max(counts), max(counts) - shift, fp16.max_exponent) + 1 + _PAD
    step = 8 if high - low <= 60 else 16 if high - low <= 120 else 32
    ticks = [(float(e), words.power(e)) for e in range(low, high + 1) if e % step == 0]
    return Scale(low=low, high=high, ticks=tuple(ticks))


def _bars(counts: dict[int, int], axis: Scale, shift: int) -> Html:
    """Draw a bar for each exponent, and the outline of the same without the loss scale."""
    width = axis.high - axis.low
    top, foot = max(counts.values()), f"{_BARS:.0f}"
    solid = "".join(
        f"M{coordinate(e - axis.low + 0.1)} {foot}v{coordinate(-_tall(n, top))}h.8V{foot}z"
        for e, n in sorted(counts.items())
    )
    parts = [tag("path", d=solid, class_="bars")]
    if shift:
        first, last = min(counts), max(counts)
        outline = f"M{coordinate(first - shift - axis.low)} {_BARS:.0f}"
        for e in range(first, last + 1):
            height = coordinate(_BARS - _tall(counts.get(e, 0), top))
            outline += f"V{height}h1"
        parts.append(tag("path", d=f"{outline}V{_BARS:.0f}", class_="outline"))
    return stretched(*parts, width=width, height=_BARS)


def _tall(count: int, top: int) -> float:
    """Height of a bar; what is there at all can be seen."""
    return max(1.5, count / top * (_BARS - 4)) if count else 0.0


def _range(form: NumberFormat, axis: Scale, y: float, *, is_own: bool) -> list[Html]:
    """Draw where a format's normal and subnormal values are."""
    ends = (form.subnormal_exponent, form.min_exponent, form.max_exponent + 1)
    lost, small, large = (axis.place(float(end)) for end in ends)
    own = " own" if is_own else ""
    label = tag("text", _short(form.name), x=-8, y=y + 9, text_anchor="end", class_=f"unit{own}")
    bars = [
        tag("rect", x=percent(a), width=percent(b - a), y=y + 1, height=_ROW - 5, class_=c + own)
        for a, b, c in ((lost, small, "subnormal"), (small, large, "normal"))
        if b > a
    ]
    return [label, *bars]


def _labels(axis: Scale, foot: float) -> list[Html]:
    parts: list[Html] = []
    for value, label in axis.ticks:
        at = percent(axis.place(value))
        parts.append(tag("line", x1=at, x2=at, y1=0, y2=foot, class_="grid"))
        parts.append(tag("text", label, x=at, y=foot + 15, text_anchor="middle"))
    return parts


def _describe(chosen: Chosen, shift: int) -> str:
    tensor = chosen.tensor
    counts = tensor.histogram or {}
    text = (
        f"{tensor.elements:,} elements, {tensor.zeros:,} of them zero; the others lie between"
        f" {words.power(min(counts))} and {words.power(max(counts) + 1)}, most of them at"
        f" {words.power(max(counts, key=lambda e: counts[e]))}. {caption(chosen)}"
    )
    if shift:
        text += f" Without the loss scale all lie {abs(shift)} powers of two "
        text += "lower." if shift > 0 else "higher."
    return text


def pattern() -> Html:
    """Define once for a page what fills subnormal ranges."""
    lines = tag("path", d="M0 8L8 0M0 4L4 0M4 8L8 4", class_="hatch")
    size = {"width": 8, "height": 8, "patternUnits": "userSpaceOnUse"}
    return tag("defs", tag("pattern", lines, id="pattern-sub", **size))


def legend(*, with_outline: bool) -> Html:
    """List what is drawn."""
    entries = [("bars", "values"), ("normal", "normal range"), ("subnormal", "subnormal range")]
    if with_outline:
        entries.insert(1, ("outline", "the same without the loss scale"))
    return legend_of(
        (sample(tag("rect", x=1, y=1, width=18, height=8, class_=c)), name) for c, name in entries
    )


def exponents_section(run: Run, prefix: str) -> Section:
    """Make the part about exponents; ``prefix`` is of all ids."""
    chosen = choose(run)
    title = "Exponents of tensors"
    if not chosen:
        missing = Missing(what="No histogram was recorded", do=WITH_NUMERICS)
        return Section(name=prefix, title=title, blocks=[missing])
    lead = (
        "How many values have which power of two, above the ranges of number formats. What lies"
        " left of a format's range becomes zero in it, what lies right of it infinite."
    )
    figures = [
        Figure(
            title=words.shown(item.tensor.name, 48),
            body=draw(item, f"{prefix}-{index}"),
            caption=caption(item),
        )
        for index, item in enumerate(chosen)
    ]
    from_legend = legend(with_outline=any(item.tensor.scale != 1 for item in chosen))
    return Section(
        name=prefix, title=title, lead=lead, blocks=[Gallery(figures=figures, legend=from_legend)]
    )
