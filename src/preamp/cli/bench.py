# SPDX-License-Identifier: BSD-3-Clause
"""``preamp bench``: times of an optimizer's step on a GPU, as a table and as rows to send."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from torch import nn

import preamp
from preamp.cli.console import make_console, print_table, print_wrapped, refusing
from preamp.cli.main import versions
from preamp.cli.options import DeviceName, choose_device
from preamp.core.errors import bad_value
from preamp.kernels import explain
from preamp.optimizers import FusedAdam

Row = dict[str, Any]
Step = Callable[[], object]

_FEWEST, _WARM_UP = 3, 3  # steps that are timed, and that compile and make state before
_COPIED = 1 << 27  # bytes that the copy reads, and as many that it writes: more than any cache
_ROW = 1024  # elements; moments are kept in 8 bits by blocks of a row

_TORCH = "torch GradScaler, AdamW"
_BYTES = {_TORCH: 48.0} | {
    f"preamp {level}, {storage}": size
    for level in ("O2", "O5")
    for storage, size in (("full", 30.0), ("split", 28.0), ("compact", 16.1))
}
"""What is measured, and the bytes that it reads and writes for each parameter."""

_CAPTION = (
    "A step is what follows a backward: it looks for an overflow, unscales, clips, and updates. "
    "GB/s come from bytes that are counted, not measured; host is the time until the calls return."
)


def bench(
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure on CUDA, or refuse.")] = False,
    device: DeviceName = "auto",
    params: Annotated[float, typer.Option(help="Elements of all tensors together.")] = 1e8,
    tensors: Annotated[str, typer.Option(help="Numbers of tensors.")] = "148,10000",
    seconds: Annotated[float, typer.Option(help="For each line of the table.")] = 3.0,
    out: Annotated[Path, typer.Option(help="Rows of JSON are appended here.")] = Path(
        "preamp-bench.jsonl"
    ),
) -> None:
    """Time AdamW's step with half weights and masters, beside torch's with GradScaler.

    About two minutes on a GPU. Rows name the device and the versions, and nothing else of the
    machine.
    """
    console = make_console()
    with refusing():
        if gpu and device != "auto":
            raise bad_value(
                f"Got --gpu and --device {device}",
                "--gpu stands for --device cuda",
                "Leave one of the two out",
            )
        where = choose_device("cuda" if gpu else device)
        cases = [_sizes(params, part.strip()) for part in tensors.split(",")]
        with out.open("a", encoding="utf-8"):  # or nothing is measured
            pass
        facts = _facts(where)
        speed = _copy_speed(where, int(min(_COPIED, 4 * params)), seconds)
    _keep(out, {**facts, "name": "copy", "status": "measured", "gb_s": speed})
    console.print(f"{facts['device']}: a copy moves {speed:,.0f} GB/s", highlight=False)
    rows: list[Row] = []
    for sizes in cases:
        for name in _BYTES:
            row: Row = {**facts, "name": name, "parameters": sum(sizes), "tensors": len(sizes)}
            try:
                row |= _measured(_step_of(name, sizes, where), sum(sizes), where, seconds)
                row["gb_s"] = _BYTES[name] * sum(sizes) / row["step_ms"] / 1e6
                row["share_of_copy"] = row["gb_s"] / speed
            except Exception as error:  # out of memory, most of all: the others are still measured
                reason = type(error).__name__  # its text may have names of folders
                row |= {"status": "not measured", "reason": reason}
            rows.append(row)
            _keep(out, row)
            gc.collect()  # engines and models refer to each other
    headings = ("step", "tensors", "ms", "host µs\na tensor", "GB/s", "of copy", "peak\nbytes")
    print_table(console, headings, map(_cells, rows))
    reasons = [f"{row['name']}: {row['reason']}" for row in rows if "reason" in row]
    print_wrapped(console, [*reasons, _CAPTION, f"Rows are in {out}."])
    if reasons:
        raise typer.Exit(1)


def _sizes(params: float, tensors: str) -> list[int]:
    """Elements of each tensor: alike, and whole rows where there is more than one."""
    count = int(params) if math.isfinite(params) else 0
    number = int(tensors) if tensors.isdecimal() else 0
    if not 1 <= number <= count:
        raise bad_value(
            f"Got --params {params:g} and --tensors {tensors}",
            "Every tensor has at least one element, and there is at least one",
            "Pass for example --params 1e8 --tensors 148,10000",
        )
    size = count // number
    return [size - size % _ROW if size > _ROW else size] * number


def _facts(device: torch.device) -> Row:
    on_gpu = device.type == "cuda"
    return {
        "benchmark": "gpu",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "kernels": explain(device=device).removeprefix("kernels: "),
        "versions": versions(),
    }


def _step_of(name: str, sizes: list[int], device: torch.device) -> Step:
    """What does a step of that name, on parameters of its own."""
    shapes = [(size // _ROW, _ROW) if size > _ROW else (size,) for size in sizes]
    weights = nn.ParameterList(torch.full(shape, 0.02, device=device) for shape in shapes)
    loss = torch.ones((), device=device)
    optimizer: Any = None
    if name != _TORCH:
        level, storage = name.removeprefix("preamp ").split(", ")
        optimizer = FusedAdam(weights.parameters(), lr=1e-4)
        given: Any = {"loss_scale": "dynamic", "storage": storage, "verbosity": 0}
        preamp.initialize(weights, optimizer, opt_level=level, **given)
        preamp.engine_of(weights).scaler(0).set_scale(64.0)
    else:
        optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device.type, init_scale=64.0)
    gradients = [torch.full_like(weight, 2.0**-4) for weight in weights]

    def attach() -> None:  # what stands for a backward
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient

    def torch_step() -> None:
        scaler.scale(loss)
        attach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def preamp_step() -> None:
        with preamp.scale_loss(loss, optimizer):
            attach()
        preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return torch_step if name == _TORCH else preamp_step


def _measured(step: Step, parameters: int, device: torch.device, seconds: float) -> Row:
    on_gpu = device.type == "cuda"
    for _ in range(_WARM_UP):
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    host, whole = _times(step, device, seconds)
    peak = torch.cuda.max_memory_allocated(device) / parameters if on_gpu else None
    numbers = {"step_ms": 1e3 * median(whole), "host_ms": 1e3 * median(host)}
    return {"status": "measured", "steps": len(whole), **numbers, "peak_bytes_per_parameter": peak}


def _times(step: Step, device: torch.device, seconds: float) -> tuple[list[float], list[float]]:
    """Of each step how long its calls took, and how long it took until the device was done."""
    host: list[float] = []
    whole: list[float] = []
    wait: Callable[[Any], object] = torch.cuda.synchronize if device.type == "cuda" else id
    end = perf_counter() + seconds
    while len(whole) < _FEWEST or perf_counter() < end:
        wait(device)
        start = perf_counter()
        step()
        host.append(perf_counter() - start)
        wait(device)
        whole.append(perf_counter() - start)
    return host, whole


def _copy_speed(device: torch.device, size: int, seconds: float) -> float:
    """GB/s that a plain copy reads and writes: the limit of everything else."""
    source, target = (torch.zeros(max(size // 4, 1), device=device) for _ in range(2))
    _, whole = _times(lambda: target.copy_(source), device, seconds / 3)
    return 2 * source.nbytes / min(whole) / 1e9


def _cells(row: Row) -> list[str]:
    name = [row["name"], f"{row['tensors']:,}"]
    if row["status"] != "measured":
        return [*name, *"–––––"]
    host = 1e3 * row["host_ms"] / row["tensors"]
    peak = row["peak_bytes_per_parameter"]
    numbers = [f"{row['step_ms']:.2f}", f"{host:.1f}", f"{row['gb_s']:,.0f}"]
    share = f"{100 * row['share_of_copy']:.0f} %"
    return [*name, *numbers, share, f"{peak:.1f}" if peak else "–"]


def _keep(out: Path, row: Row) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
