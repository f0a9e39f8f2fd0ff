# SPDX-License-Identifier: BSD-3-Clause
"""Write ``docs/benchmarks.md`` and its figures from the rows in ``benchmarks/results``.

Of every comparison the latest run counts. A number that nobody measured is not on the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import aims
import distributed_section
import numerics_section
import parts_section
import plots
import storage_section
from preamp_bench.records import Record, read

RESULTS = Path(__file__).with_name("results")
DOCS = Path(__file__).parents[1] / "docs"

STEP_CASE = ("device", "parameters", "tensors", "half", "clip", "threads")
RIVALS = ("GradScaler + fused AdamW", "torch, naive", "torch, kept buffers", "torch.compile")
DISTRIBUTED_CASE = ("device", "width")
PART_CASE = ("part", "device", "half", "parameters", "tensors", "clip")
TRAIN_CASE = ("device", "model", "width", "batch", "level")

HEADER = """\
# Benchmarks

Generated from `benchmarks/results` by `python benchmarks/report.py`. Measured by
`make bench BENCHES="step parts train distributed"` in a clone; run it to see your own machine.

Machines are shared and moody, so variants are never timed one after the other: a round runs each of
them once, in an order that rotates. The **best** of many rounds is what the code can do, and the
number in every table. **×** is that best over the best of the first row in its group. The rows in
`benchmarks/results` also have the median, the 20th and 80th percentile of the times, and of the
ratios within a round. All of it ran on one thread where a heading does not say otherwise.
"""

STEP = """\
## The update

Everything between `backward` and the next forward: check for overflow, unscale, clip, AdamW, round
the half weights. The model is only its parameters, and gradients are put in place instead of
computed. **%** is the least number of bytes that the step could move (32 per parameter with float32
weights; 30 with half weights, float32 masters and half gradients, 28 with split masters, 16 with
moments in 8 bits as well; 2 less where nothing is checked) over the best time, as a share of the
speed of a plain copy in the same rounds.

- *GradScaler + fused AdamW*: float32 weights, `torch.amp.GradScaler`, `clip_grad_norm_`,
  `torch.optim.AdamW(fused=True)`.
- *torch, naive*: half weights, masters by hand, every gradient widened into a new tensor; *kept
  buffers*: the same with care for memory; *torch.compile*: one compiled update for each tensor.
- *preamp*: `scale_loss`, `preamp.clip_grad_norm_`, `step`, with torch's optimizer or preamp's;
  *preamp ops*: the arithmetic alone, without the engine's bookkeeping.
- *bfloat16 only*: optimizers without float32 masters. They move fewer bytes and compute something
  else; their group's first row is torch's AdamW on bfloat16 weights.
"""

TRAIN = """\
## Whole steps

Forward, backward, clipping, AdamW and rounding of the demo's GPT (4 layers, 64 bytes of context)
and of a convolutional network with batch normalization, on random data, against loops written by
hand with the same numerics: `torch.autocast` and `GradScaler` (O1, O4; on CPUs with GELU, softmax,
layer norms and losses in float32, as on GPUs and with preamp), float32 masters (O2, O5), nothing
but half (O3). *bf16 autocast by hand* is torch's as it is, which leaves those in half precision on
CPUs. Each loop has a process of its own, since the casts of an O1 engine hold for a whole process.
All are started three times, and the best counts. On AMD EPYC (AVX512) they kept the memory that a
step frees for the next one, which `MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_MAX_=0` in the
environment tells glibc. Otherwise it hands large blocks back to the system in one process and not
in another, and the very same loop takes up to a fifth longer; the earlier rows of other machines
have that in their spread. Any training on CPUs may gain from this setting. **Peak** is how
far the resident memory of a process rose (on CUDA: what was allocated) from before the model was
made; **B/param** are weights, masters, gradients and optimizer state, counted between backward and
step.

Where the CPU has no units for a half dtype, torch multiplies its matrices one element at a time,
and preamp runs these products in float32 and rounds once. Most CPUs have none for float16, and none
for bfloat16 before AVX-512; and float16 convolutions run that way on all, their backward at fifty
times the time of float32's. There the ratio says what that is worth, and nothing about
preamp's overhead, which is read at O0 then. Aimed at are an overhead of 2 % and an O5 that is
faster than bfloat16 autocast. On AMD EPYC (AVX512) the GPT has both, the second with FusedAdam; its
convnet has neither at O4 and O5. There a step is so short that a fixed cost of Python shows: hooks,
blocks and books of masters, which find the caches emptied by the backward. Elsewhere the spread is
wider than 2 %, so those rows neither show nor refute it. The first step loads numba where it is
installed, which takes about 120 MB of the process's memory, whatever the model; that is in every
peak of preamp's.
"""


IMPORT = """\
## Import

Time of `import preamp` after `import torch`, as `python -X importtime` counts it, over several new
processes (`python benchmarks/bench_import.py`).
"""


def latest(rows: Iterable[Record], case: Sequence[str]) -> dict[tuple[object, ...], list[Record]]:
    """Group rows by case and keep the latest run of each.

    Args:
        rows: All records of a file.
        case: The fields that make a case.

    Returns:
        The records of each case, cases in order.
    """
    runs: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for row in rows:
        key = tuple(row[field] for field in case)
        runs.setdefault(key, {}).setdefault(row["date"], []).append(row)
    return {key: runs[key][max(runs[key])] for key in sorted(runs, key=str)}


def render(
    step_rows: list[Record],
    train_rows: list[Record],
    import_rows: Sequence[Record] = (),
    numerics_rows: Sequence[Record] = (),
    distributed_rows: Sequence[Record] = (),
    part_rows: Sequence[Record] = (),
    storage_rows: Sequence[Record] = (),
) -> str:
    """Write the page.

    Args:
        step_rows: Records of `preamp_bench.step`.
        train_rows: Records of `preamp_bench.train`.
        import_rows: Records of ``benchmarks/bench_import.py``.
        numerics_rows: Records of ``benchmarks/bench_numerics.py``.
        distributed_rows: Records of `preamp_bench.distributed`.
        part_rows: Records of ``benchmarks/bench_parts.py``.
        storage_rows: Records of ``benchmarks/bench_storage.py``.

    Returns:
        Markdown.
    """
    steps = [row for case in latest(step_rows, STEP_CASE).values() for row in case]
    trains = [row for case in latest(train_rows, TRAIN_CASE).values() for row in case]
    lines = [HEADER, STEP]
    lines += _step_part(steps) if steps else ["Not measured.", ""]
    for part, text, write in (
        ("kernels", parts_section.TEXT, parts_section.kernels),
        ("bookkeeping", parts_section.BOOKKEEPING, parts_section.bookkeeping),
    ):
        cases = latest([r for r in part_rows if r["part"] == part], PART_CASE).values()
        lines += [text, *(write(cases, _machines) if cases else ["Not measured.", ""])]
    lines += [TRAIN]
    lines += _train_part(trains) if trains else ["Not measured.", ""]
    ways = list({(row["task"], row["name"]): row for row in storage_rows}.values())
    lines += [storage_section.TEXT]
    lines += storage_section.table(ways, _machines) if ways else ["Not measured.", ""]
    numerics = latest(numerics_rows, TRAIN_CASE).values()
    lines += [numerics_section.TEXT]
    lines += numerics_section.table(numerics, _machines) if numerics else ["Not measured.", ""]
    ranks = latest(distributed_rows, DISTRIBUTED_CASE).values()
    lines += [distributed_section.TEXT]
    lines += distributed_section.table(ranks, _machines) if ranks else ["Not measured.", ""]
    lines += [IMPORT]
    lines += _import_part(import_rows) if import_rows else ["Not measured.", ""]
    lines += _not_measured([*steps, *trains])
    return "\n".join(lines).rstrip("\n") + "\n"


def _machines(rows: list[Record]) -> str:
    fields = ("device", "cores", "torch", "python", "commit")
    seen = dict.fromkeys(tuple(str(row[field]) for field in fields) for row in rows)
    return "; ".join(
        f"{device}, {cores} cores, torch {torch}, Python {python}, commit `{commit}`"
        for device, cores, torch, python, commit in seen
    )


_STEP_TABLE = ("device", "parameters", "half", "clip", "threads")


def _step_part(rows: list[Record]) -> list[str]:
    lines = [f"Measured on {_machines(rows)}.", ""]
    lines += ["![Share of a copy's speed by number of tensors](benchmarks-step.svg)", ""]
    lines += _ranges(rows)
    lines += aims.table(latest(rows, STEP_CASE).values())
    tables = dict.fromkeys(
        tuple(row[field] for field in _STEP_TABLE)
        for row in sorted(rows, key=lambda row: (row["device"], row["parameters"], not row["clip"]))
    )
    for wanted in tables:
        device, parameters, half, clip, threads = wanted
        clipping = "with clipping" if clip else "without clipping"
        also = f", {threads} threads" if threads > 1 else ""
        lines += [f"### {parameters:,} parameters, {half}, {clipping}, {device}{also}", ""]
        lines += _step_table([r for r in rows if tuple(r[f] for f in _STEP_TABLE) == wanted])
    return lines


def _ranges(rows: list[Record]) -> list[str]:
    """Best time of preamp's variants over that of torch's, over all cases: least and greatest."""
    cases = latest(rows, STEP_CASE).values()
    lines = [
        "| over all cases below | " + " | ".join(RIVALS) + " |",
        "|---|" + "---|" * len(RIVALS),
    ]
    for name in dict.fromkeys(row["name"] for row in rows if row["name"].startswith("preamp")):
        cells = [_range(cases, name, rival) for rival in RIVALS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _range(cases: Iterable[list[Record]], name: str, rival: str) -> str:
    bests = [{r["name"]: r["best"] for r in case if r["status"] == "measured"} for case in cases]
    ratios = [best[name] / best[rival] for best in bests if name in best and rival in best]
    # float32 weights against half ones by hand would compare two kinds of training.
    if not ratios or (name.startswith("preamp O0") and rival != RIVALS[0]):
        return ""
    return f"{min(ratios):.2f}–{max(ratios):.2f}×"


def _step_table(rows: list[Record]) -> list[str]:
    counts = sorted({row["tensors"] for row in rows})
    cells = {(row["name"], row["group"], row["tensors"]): row for row in rows}
    lines = ["| group | variant | " + " | ".join(f"{count:,} tensors" for count in counts) + " |"]
    lines += ["|---|---|" + "---|" * len(counts)]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    names = dict.fromkeys((row["name"], row["group"]) for row in rows)
    for name, group in sorted(names, key=lambda pair: groups.index(pair[1])):
        texts = [_step_cell(cells.get((name, group, count))) for count in counts]
        lines.append(f"| {group} | {name} | " + " | ".join(texts) + " |")
    return [*lines, ""]


def _step_cell(row: Record | None) -> str:
    if row is None or row["status"] != "measured":
        return "not measured"
    return f"{_ms(row['best'])} · {row['best_ratio']:.2f}× · {row['share_of_copy']:.1%}"


def _train_part(rows: list[Record]) -> list[str]:
    lines = [f"Measured on {_machines(rows)}.", ""]
    lines += ["![Time of a step over the same by hand](benchmarks-train.svg)", ""]
    for device, model in dict.fromkeys((row["device"], row["model"]) for row in rows):
        chosen = [row for row in rows if (row["device"], row["model"]) == (device, model)]
        size = chosen[0]
        lines += [f"### {model}, width {size['width']}, batch {size['batch']}, {device}", ""]
        lines += ["| loop | best | × | ratio, p20–p80 | to bf16 autocast | peak | B/param |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_train_line(row) for row in chosen]
        lines += [""]
    return lines


def _train_line(row: Record) -> str:
    if row["status"] != "measured":
        return f"| {row['name']} | not measured | | | | | |"
    counted = sum(row[part] for part in ("weights", "masters", "gradients", "optimizer_state"))
    peak = "not measured" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f} MB"
    against = f"{row['to_autocast']:.2f}×" if "to_autocast" in row else ""
    spread = f"{row['ratio_p20']:.2f}–{row['ratio_p80']:.2f}"
    return (
        f"| {row['name']} | {_ms(row['best'])} | {row['best_ratio']:.2f}× | {spread}"
        f" | {against} | {peak} | {counted:.1f} |"
    )


def _import_part(rows: Sequence[Record]) -> list[str]:
    lines = ["| machine | best | median | worst | processes |", "|---|---|---|---|---|"]
    for (row,) in latest(rows, ("device",)).values():
        times = " | ".join(f"{row[field]:.0f} ms" for field in ("best", "p50", "worst"))
        lines.append(f"| {_machines([row])} | {times} | {row['rounds']} |")
    return [*lines, ""]


def _not_measured(rows: list[Record]) -> list[str]:
    """Every reason once, and the kinds of machine that no row comes from."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "measured":
            case = f"{row['parameters']:,} in {row['tensors']:,}" if "tensors" in row else ""
            places = reasons.setdefault((row["name"], row["reason"]), [])
            places += [case] * (case not in places)
    lines = ["## Not measured", ""]
    lines += [
        f"- {name}" + (f" ({'; '.join(filter(None, cases))})" if any(cases) else "") + f": {reason}"
        for (name, reason), cases in reasons.items()
    ]
    if not any(row["device"] != row["cpu"] for row in rows):
        lines.append("- Any GPU.")
    return lines


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"


def main() -> None:
    """Write page and figures."""
    names = ("step", "train", "import", "numerics", "distributed", "parts", "storage")
    files = [RESULTS / f"{name}.jsonl" for name in names]
    found = [read(file) if file.exists() else [] for file in files]
    steps, trains, *_ = found
    page = render(*found)
    DOCS.joinpath("benchmarks.md").write_text(page, encoding="utf-8")
    drawn = (
        ("benchmarks-step.svg", plots.draw_step, latest(steps, STEP_CASE)),
        ("benchmarks-train.svg", plots.draw_train, latest(trains, TRAIN_CASE)),
    )
    for name, draw, cases in drawn:
        measured = [r for rows in cases.values() for r in rows if r["status"] == "measured"]
        if measured:
            DOCS.joinpath(name).write_text(draw(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
