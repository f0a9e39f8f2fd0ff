# SPDX-License-Identifier: BSD-3-Clause
"""The command line of the benchmarks: options in, rows and tables out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import preamp
from preamp.cli.console import make_console, refused
from preamp.cli.demo import choose_device
from preamp.core.errors import PreampUnavailableError, message
from preamp_bench import distributed, records, step, train
from preamp_bench.harness import Effort
from preamp_bench.tables import show_distributed, show_step, show_train
from preamp_bench.tasks import TASKS, TaskConfig

bench = typer.Typer(
    name="bench", help="Measure preamp against the same written by hand.", no_args_is_help=True
)

Out = Annotated[Path | None, typer.Option(help="File that rows are appended to, as JSON lines.")]
Seconds = Annotated[float, typer.Option(help="Time for each comparison; a few rounds always run.")]
Device = Annotated[str, typer.Option(help="auto (cuda where there is one), cpu, cuda, …")]


@bench.command("step")
def bench_step(
    params: Annotated[str, typer.Option(help="Numbers of parameters, as 1e6,1e7.")] = "1e6,1e7",
    tensors: Annotated[str, typer.Option(help="Numbers of tensors.")] = "10,1000,10000",
    clips: Annotated[str, typer.Option(help="Clip the norm: yes, no, or both.")] = "yes",
    threads: Annotated[int, typer.Option(help="How many torch and the kernels take.")] = 1,
    seconds: Seconds = 6.0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time the optimizer's side of a step: check, unscale, clip, AdamW, round.

    One process; all variants of a comparison take turns.
    """
    console = make_console()
    try:
        where = choose_device(device)
        counts, sizes = numbers(params, "--params"), numbers(tensors, "--tensors")
        cases = step.grid(counts, sizes, _clips(clips), where)
    except (ValueError, PreampUnavailableError) as error:
        raise refused(error) from None
    for case in cases:
        rows = step.run_case(case, Effort(seconds=seconds), threads)
        show_step(rows, console)
        keep(rows, out)


@bench.command("train")
def bench_train(
    levels: Annotated[str, typer.Option(help="Opt levels.")] = ",".join(preamp.OPT_LEVELS),
    models: Annotated[str, typer.Option(help="What to train.")] = ",".join(TASKS),
    width: Annotated[int, typer.Option(help="Size of the models.")] = 256,
    batch: Annotated[int, typer.Option(help="Windows of text, or images, in a step.")] = 8,
    seconds: Seconds = 15.0,
    device: Device = "auto",
    out: Out = None,
) -> None:
    """Time whole training steps against loops written by hand with the same numerics.

    Every loop runs in a process of its own, on one thread; the loops of a level take turns.
    """
    console = make_console()
    try:
        where = str(choose_device(device))
        names = _names(levels)
        train.check_levels(names)
        tasks = [
            TaskConfig(name=name, width=width, batch=batch, device=where) for name in _names(models)
        ]
    except (ValueError, PreampUnavailableError) as error:
        raise refused(error) from None
    for task in tasks:
        for level in names:
            rows = train.run_level(task, level, Effort(seconds=seconds))
            show_train(rows, console)
            keep(rows, out)


@bench.command("distributed")
def bench_distributed(
    width: Annotated[int, typer.Option(help="Of the model's four linear layers.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often each step is timed.")] = 30,
    out: Out = None,
) -> None:
    """Time steps on two ranks next to plain DDP's and FSDP2's, and small all-reduces.

    Both ranks are processes on this machine, joined by gloo, on one thread each.
    """
    try:
        config = distributed.Config(width=width, rounds=rounds)
    except ValueError as error:
        raise refused(error) from None
    rows = distributed.run(config)
    show_distributed(rows, make_console())
    keep(rows, out)


def numbers(text: str, option: str) -> list[int]:
    """Read numbers separated by commas, such as ``"1e6,2000"``.

    Raises:
        ValueError: One of them is not a whole number above zero.
    """
    try:
        found = [float(part) for part in text.split(",")]
        if all(value >= 1 and value == int(value) for value in found):
            return [int(value) for value in found]
    except (ValueError, OverflowError):
        pass
    raise ValueError(
        message(
            f"{option} got {text!r}",
            "It takes whole numbers above zero, separated by commas",
            f"Pass for example {option} 1000,1e6",
        )
    )


def keep(rows: list[records.Record], out: Path | None) -> None:
    """Append rows to the file that was asked for."""
    if out is not None:
        records.append(out, rows)


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _clips(text: str) -> tuple[bool, ...]:
    """Whether steps clip, of each round of cases."""
    known = {"yes": (True,), "no": (False,), "both": (True, False)}
    if text not in known:
        raise ValueError(
            message(f"--clips got {text!r}", f"It takes {', '.join(known)}", "Check the spelling")
        )
    return known[text]
