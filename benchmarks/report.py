# SPDX-License-Identifier: BSD-3-Clause
"""Write ``docs/benchmarks.md`` and its two figures from the rows in ``benchmarks/results``.

Each table shows the machine of its newest row, and of every case there the latest run. A number
that nobody measured is not on the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import plots
from preamp_bench.records import Record, read

RESULTS = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[1] / "docs"

STEP_CASE = ("parameters", "tensors", "half")
TRAIN_CASE = ("model", "level")

SCALER = "GradScaler + fused AdamW"
FUSED = "FusedAdam"
HALVES = {"float16": "O2", "bfloat16": "O5"}
"""The level whose step is timed for each half dtype."""

STEP_VARIANTS = {
    **{"GradScaler, fp32": SCALER, "by hand": "torch, naive"},
    **{"kept buffers": "torch, kept buffers", "compiled": "torch.compile"},
    **{"torch AdamW": "preamp {level}, torch AdamW", "FusedAdam": "preamp {level}, FusedAdam"},
    **{"split": "preamp {level} split, FusedAdam", "compact": "preamp {level} compact, FusedAdam"},
}
"""Column → the name of its rows."""

AIMS = {10: 1.6, 300: 2.0, 1000: 2.8, 10_000: 3.5}
"""By number of tensors, how many times as fast as `SCALER` the step with clipping was to be."""

OF_A_COPY = 0.9
OVERHEAD = 1.02
READABLE = ("O0", "O4", "O5")
"""Levels whose loops by hand run at the speed of the machine on CPUs with units for bfloat16."""

METHOD = """\
## How it was measured

Other programs use these machines too, so variants are never timed one after the other. A round
runs each variant once, in an order that rotates, and there are many rounds. Every time is the
**best** of all rounds, on one thread. Rows in `benchmarks/results` also have the median, and the
20th and 80th percentile of times and of ratios within a round. Each table shows the machine of its
newest row; earlier rows are in the repository's history. “–” is not measured.

`python benchmarks/report.py` writes this page from these rows. Measure your own machine in a clone
by `make bench`, which appends rows and writes the page anew.
"""

STEP = """\
## The update

Everything between `backward` and the next forward: check for overflow, unscale, clip, AdamW, round
the half weights. The model is only its parameters, and gradients are put in place. Columns of
times, in milliseconds:

- **GradScaler, fp32**: float32 weights, `torch.amp.GradScaler` and torch's fused AdamW.
- Plain torch with half weights and float32 masters. **By hand**: each gradient is widened into a
  new tensor. **Kept buffers**: the masters' gradients keep their memory from step to step, and
  their norm tells of an overflow. **Compiled**: one function of `torch.compile` updates a tensor in
  one pass.
- preamp at O2 (float16) or O5 (bfloat16). **torch AdamW**, **FusedAdam**: the optimizer. **Split**,
  **compact**: FusedAdam with [less memory](storage.md).

**Faster** is GradScaler's time over that of FusedAdam. **Of a copy**, for FusedAdam too, is the
bytes that a step has to move, divided by its time, as a share of a plain copy's speed.
"""

TRAIN = """\
## Whole steps

Forward, backward, clipping, AdamW and rounding of the demo's GPT and of a convolutional network
with batch norms, on random data. **×** is the time over the first row of the level: the same
numerics written by hand. **To autocast** is the time over `torch.autocast` in bfloat16. **B/param**
are weights, masters, gradients and optimizer state between backward and step. **Peak** is how far
the resident memory of the GPT's process rose. preamp's peaks include numba, some 120 MB whatever
the model. Few CPUs have units for float16. Without them torch multiplies one element at a time, and
preamp multiplies in float32. So at O1 to O3 a small ratio says nothing about overhead.

Each loop has a process of its own, started three times. Those on AMD EPYC (AVX512) ran with
`MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_MAX_=0`, so that glibc keeps freed memory for the
next step. Without these variables the very same loop takes up to a fifth longer in some processes.
"""

STORAGE = """\
## Memory and accuracy

The same small models trained with each [storage](storage.md), and by optimizers of other packages
on bfloat16 weights, from the same weights on the same batches (`benchmarks/bench_storage.py`).
Scores are of held-out data, means over the seeds, and less is better. **To float32** is the
difference to float32 of the same seed, mean ± standard deviation. In the first row it is the
standard deviation of the scores, which is what another seed changes.
"""


def newest(rows: Iterable[Record], case: Sequence[str]) -> list[Record]:
    """Take the machine of the newest row, and the latest run of each of its cases."""
    rows = list(rows)
    if not rows:
        return []
    device = max(rows, key=lambda row: row["date"])["device"]
    runs: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for row in rows:
        if row["device"] == device:
            key = tuple(row[field] for field in case)
            runs.setdefault(key, {}).setdefault(row["date"], []).append(row)
    return [row for key in sorted(runs) for row in runs[key][max(runs[key])]]


def steps_shown(rows: Iterable[Record]) -> list[Record]:
    """Choose the rows of the first table: with clipping, on one thread."""
    return newest((row for row in rows if row["clip"] and row["threads"] == 1), STEP_CASE)


def render(
    step_rows: Sequence[Record], train_rows: Sequence[Record], storage_rows: Sequence[Record] = ()
) -> str:
    """Write the page."""
    steps, trains = steps_shown(step_rows), newest(train_rows, TRAIN_CASE)
    ways = newest(storage_rows, ("task", "name"))
    cases = [_StepCase(chosen) for chosen in _grouped(steps, STEP_CASE)]
    lines = ["# Benchmarks", "", *_found(cases, trains, ways), METHOD]
    lines += [STEP, *(_step_table(steps, cases) if steps else ["Not measured.", ""])]
    lines += [TRAIN, *(_train_table(trains) if trains else ["Not measured.", ""])]
    lines += [STORAGE, *(_storage_table(ways) if ways else ["Not measured.", ""])]
    lines += _not_measured([*_in_table(steps), *trains, *ways])
    return "\n".join(lines).rstrip("\n") + "\n"


def _found(
    cases: Sequence[_StepCase], trains: Sequence[Record], ways: Sequence[Record]
) -> list[str]:
    """What the tables come to, in a paragraph, and of how many machines they are."""
    faster = [case.faster for case in cases if case.faster is not None]
    against = [row["to_autocast"] for row in _preamp_at_o5(trains)]
    stored = [one for one in _scores_apart(ways) if one.name != "O5"]
    beyond = dict.fromkeys(one.name for one in stored if one.is_beyond)
    rows = [*_in_table(r for case in cases for r in case.measured.values()), *trains, *ways]
    machines = len({row["device"] for row in rows})
    count = _COUNTS[machines] if machines < len(_COUNTS) else str(machines)
    first = _paragraph(
        f"The update is {_range(faster)} times as fast as GradScaler's." if faster else "",
        f"A step at O5 takes {_range(against)} times as long as with autocast." if against else "",
        "Split and compact storage score as float32 does, within what another seed changes."
        if stored and not beyond
        else "",
        f"Beyond what another seed changes, {', '.join(beyond)} score unlike float32."
        if beyond
        else "",
        "No GPU was measured." if rows and _is_without_gpu(rows) else "",
    )
    tables = f"The tables are of {count} machine{'s' * (machines != 1)}, named above each."
    return [*first, *_paragraph(tables)] if rows else []


_COUNTS = ("no", "one", "two", "three")


def _grouped(rows: Iterable[Record], fields: Sequence[str]) -> list[list[Record]]:
    groups: dict[tuple[object, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return list(groups.values())


def _machine(rows: Sequence[Record]) -> str:
    fields = ("device", "cores", "torch", "python")
    (one,) = dict.fromkeys(tuple(row[field] for field in fields) for row in rows)
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    return "Measured on {}, {} cores, torch {}, Python {}, commits {}.".format(*one, commits)


def _in_table(steps: Iterable[Record]) -> list[Record]:
    """Rows of variants that have a column; optimizers without masters have none."""
    columns = {
        name.format(level=level) for name in STEP_VARIANTS.values() for level in HALVES.values()
    }
    return [row for row in steps if row["name"] in columns]


class _StepCase:
    """The rows of one number of parameters and tensors in one half dtype."""

    def __init__(self, rows: Sequence[Record]) -> None:
        first = rows[0]
        self.parameters, self.tensors, self.half = (first[field] for field in STEP_CASE)
        self.measured = {row["name"]: row for row in rows if row["status"] == "measured"}
        self.fused = self.measured.get(f"preamp {HALVES[self.half]}, {FUSED}")
        self.share = None if self.fused is None else self.fused["share_of_copy"]

    @property
    def faster(self) -> float | None:
        """GradScaler's time over that of `FusedAdam`."""
        if self.fused is None or SCALER not in self.measured:
            return None
        return self.measured[SCALER]["best"] / self.fused["best"]

    def line(self) -> str:
        """The case as a row of the table."""
        level = HALVES[self.half]
        names = (name.format(level=level) for name in STEP_VARIANTS.values())
        found = (self.measured.get(name) for name in names)
        times = [_number(row["best"]) if row else "–" for row in found]
        faster = "–" if self.faster is None else f"{self.faster:.2f}×"
        share = "–" if self.share is None else f"{self.share:.0%}"
        size = f"{self.parameters:,} | {self.tensors:,}"
        return f"| {size} | {self.half} | " + " | ".join([*times, faster, share]) + " |"


def _number(milliseconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:#.3g}"


def _step_table(rows: Sequence[Record], cases: Sequence[_StepCase]) -> list[str]:
    columns = ["parameters", "tensors", "half", *STEP_VARIANTS, "faster", "of a copy"]
    return [
        *(_machine(rows), ""),
        *(f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"),
        *(case.line() for case in cases),
        "",
        *_step_aims(cases),
        *("![Share of a copy's speed by number of tensors](benchmarks-step.svg)", ""),
    ]


def _train_table(rows: Sequence[Record]) -> list[str]:
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = [name for model in models for name in (model, "×", "to autocast")]
    columns = ["level", "loop", *columns, "B/param", "peak"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for loop in sorted(_grouped(rows, ("level", "name")), key=lambda loop: loop[0]["level"]):
        cells = {row["model"]: row for row in loop}
        times = [cell for model in models for cell in _train_cells(cells.get(model))]
        memory = _memory_cells(cells.get("gpt", loop[0]))
        level = loop[0]["level"]
        name = loop[0]["name"].replace(f"{level} by", "by").replace(f"preamp {level}", "preamp")
        lines.append("| " + " | ".join([level, name, *times, *memory]) + " |")
    figure = "![Time of a step over the same by hand](benchmarks-train.svg)"
    return [_machine(rows), "", *lines, "", *_train_aims(rows), figure, ""]


def _train_cells(row: Record | None) -> list[str]:
    if row is None or row["status"] != "measured":
        return ["not measured", "", ""]
    against = f"{row['to_autocast']:.2f}×" if "to_autocast" in row else ""
    return [f"{_number(row['best'])} ms", f"{row['best_ratio']:.2f}×", against]


def _memory_cells(row: Record) -> list[str]:
    if row["status"] != "measured":
        return ["", ""]
    counted = sum(row[part] for part in ("weights", "masters", "gradients", "optimizer_state"))
    peak = "not measured" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB"
    return [f"{counted:.1f}", peak]


def _storage_table(rows: Sequence[Record]) -> list[str]:
    tasks = {task[0]["task"]: task for task in _grouped(rows, ("task",))}
    base = {row["task"]: row["scores"] for row in rows if row["name"] == "float32"}
    pairs = [
        (task, score)
        for task in tasks
        for score in base.get(task, ())
        if score != "bytes per parameter"
    ]
    head = [cell for task, score in pairs for cell in (f"{task}: {score}", "to float32")]
    lines = [f"| trained as | {' | '.join(head)} | B/param |", "|---" * (len(head) + 2) + "|"]
    ways = _grouped(sorted(rows, key=_bytes_of, reverse=True), ("name",))
    for way in sorted(ways, key=lambda way: way[0]["name"] != "float32"):
        cells: list[str] = []
        measured = {row["task"]: row for row in way if row["status"] == "measured"}
        for task, score in pairs:
            row = measured.get(task)
            cells += _score_cells(row, base[task], score) if row else ["not measured", ""]
        held = f"{_bytes_of(way[0]):.2f}" if measured else ""
        lines.append(f"| {way[0]['name']} | " + " | ".join([*cells, held]) + " |")
    sizes = "; ".join(
        f"{task}: {rows[0]['steps']} steps, {rows[0]['seeds']} seeds"
        for task, rows in tasks.items()
    )
    return [f"{_machine(rows)} {sizes}.", "", *lines, "", *_storage_aims(rows)]


def _bytes_of(row: Record) -> float:
    return mean(row["scores"]["bytes per parameter"]) if row["status"] == "measured" else 0.0


def _score_cells(row: Record, base: dict[str, list[float]], name: str) -> list[str]:
    own = row["scores"][name]
    if row["name"] == "float32":
        return [f"{mean(own):.4f}", f"± {stdev(own):.4f}"]
    apart = [a - b for a, b in zip(own, base[name], strict=True)]
    return [f"{mean(own):.4f}", f"{mean(apart):+.4f} ± {stdev(apart):.4f}"]


def _paragraph(*sentences: str) -> list[str]:
    """Sentences as a paragraph of the page; empty ones are left out."""
    return [*textwrap.wrap(" ".join(filter(None, sentences)), 100), ""]


def _of(reached: int, things: int, name: str) -> str:
    """How many of some things, in words such as "none of the 14 cases"."""
    count = {0: "none", things: "all"}.get(reached, str(reached))
    return f"{count} of the {things} {name}s"


def _range(ratios: Sequence[float], unit: str = "") -> str:
    """The lowest and the highest, or the one that both are."""
    low, high = (f"{choose(ratios):.2f}" for choose in (min, max))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def _step_aims(cases: Sequence[_StepCase]) -> list[str]:
    """What was aimed at with the first table; the reasons hold for CPUs of every size."""
    timed = [(case.faster, AIMS[case.tensors]) for case in cases if case.tensors in AIMS]
    aimed = [(faster, aim) for faster, aim in timed if faster is not None]
    shares = [case.share for case in cases if case.share is not None]
    lines: list[str] = []
    if aimed:
        fast = sum(faster >= aim for faster, aim in aimed)
        aims = [f"{aim:g} times with {tensors:,}" for tensors, aim in AIMS.items()]
        lines += _paragraph(
            f"**Aim: faster than GradScaler,** {', '.join(aims[:-1])} and {aims[-1]} tensors.",
            f"Reached in {_of(fast, len(aimed), 'case')}.",
            f"The update was {_range([faster for faster, _ in aimed])} times as fast.",
            "The aims were too high: preamp moves 30 bytes for each parameter and torch's float32"
            " step 52, so where memory is the limit 1.7 times as fast is all there is to win.",
        )
    if shares:
        near = sum(share >= OF_A_COPY for share in shares)
        lines += _paragraph(
            f"**Aim: {OF_A_COPY:.0%} of a copy's speed.**",
            f"Reached in {_of(near, len(shares), 'case')}.",
            "In the others the Python of a step holds it back where parameters are few, and the"
            " bookkeeping for each tensor where there are thousands."
            if near < len(shares)
            else "",
            "More than 100% is no error: a copy first reads the memory that it writes to, which"
            " its two counted passes leave out, and an update in place has read it anyway."
            if max(shares) > 1
            else "",
        )
    return lines


def _preamp_at_o5(rows: Iterable[Record]) -> list[Record]:
    """Loops with preamp at O5 that have a time beside autocast's."""
    return [
        row
        for row in rows
        if row["status"] == "measured" and row["name"].startswith("preamp")
        if row["level"] == "O5" and "to_autocast" in row
    ]


def _train_aims(rows: Sequence[Record]) -> list[str]:
    """What was aimed at with the second table."""
    ours = [
        row
        for row in rows
        if row["status"] == "measured" and row["name"].startswith("preamp")
        if row["level"] in READABLE
    ]
    against = [row["to_autocast"] for row in _preamp_at_o5(rows)]
    lines: list[str] = []
    if ours:
        late = [row for row in ours if row["best_ratio"] > OVERHEAD]
        names = [f"{row['name'].removeprefix('preamp ')} ({row['model']})" for row in late]
        lines += _paragraph(
            f"**Aim: at {', '.join(READABLE)} at most {OVERHEAD - 1:.0%} more time than by hand.**",
            f"Reached by {_of(len(ours) - len(late), len(ours), 'loop')} with preamp.",
            f"Missed by {'; '.join(names)}, at {_range([row['best_ratio'] for row in late], '×')}."
            if late
            else "",
            "A step of the convolutional network is so short that fixed costs of Python show."
            if "convnet" in {row["model"] for row in late}
            else "",
        )
    if against:
        lines += _paragraph(
            "**Aim: O5 faster than autocast in bfloat16.**",
            f"Reached by {_of(sum(ratio < 1 for ratio in against), len(against), 'loop')}.",
            f"A step took {_range(against)} times as long as with autocast.",
        )
    return lines


class _Score(NamedTuple):
    """A score of one of preamp's ways to train."""

    name: str
    task: str
    score: str
    is_beyond: bool  # whether it is further from float32's than another seed of float32


def _scores_apart(rows: Sequence[Record]) -> list[_Score]:
    """The scores of preamp's ways of the third table."""
    base = {row["task"]: row["scores"] for row in rows if row["name"] == "float32"}
    ours = [row for row in rows if row["status"] == "measured" and row["name"].startswith("O5")]
    found: list[_Score] = []
    for row in ours:
        wanted = base.get(row["task"], {})
        for score, own in row["scores"].items():
            if score != "bytes per parameter" and score in wanted:
                by = abs(mean(own) - mean(wanted[score]))
                found.append(_Score(row["name"], row["task"], score, by > stdev(wanted[score])))
    return found


def _storage_aims(rows: Sequence[Record]) -> list[str]:
    """How far preamp's ways of the third table are from float32, beside what a seed changes."""
    apart = _scores_apart(rows)
    if not apart:
        return []
    beyond = [(one.name, one.task, one.score) for one in apart if one.is_beyond]
    return _paragraph(
        "**No number was aimed at.** The measure is how far another seed comes from float32:",
        f"{_of(len(apart) - len(beyond), len(apart), 'score')} with O5 are no further.",
        f"Beyond it are {'; '.join(f'{name} ({task}: {score})' for name, task, score in beyond)}."
        if beyond
        else "",
    )


def _is_without_gpu(rows: Iterable[Record]) -> bool:
    return all(row["device"] == row["cpu"] for row in rows)


def _not_measured(rows: Sequence[Record]) -> list[str]:
    """Every reason once, and the kind of machine that no row comes from."""
    missing = dict.fromkeys(
        f"{row['name']} ({row['reason'].rstrip('.')})"
        for row in rows
        if row["status"] != "measured"
    )
    names = [*missing, *(["any GPU"] if _is_without_gpu(rows) else [])]
    return textwrap.wrap(f"Not measured: {'; '.join(names)}.", 100) if names else []


def main() -> None:
    """Write page and figures."""
    files = [RESULTS / f"{name}.jsonl" for name in ("step", "train", "storage")]
    steps, trains, storage = (read(file) if file.exists() else [] for file in files)
    page = render(steps, trains, storage)
    DOCS.joinpath("benchmarks.md").write_text(page, encoding="utf-8")
    drawn = (
        ("benchmarks-step.svg", plots.draw_step, steps_shown(steps)),
        ("benchmarks-train.svg", plots.draw_train, newest(trains, TRAIN_CASE)),
    )
    for name, draw, rows in drawn:
        measured = [row for row in rows if row["status"] == "measured"]
        if measured:
            DOCS.joinpath(name).write_text(draw(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
