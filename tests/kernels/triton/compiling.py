# SPDX-License-Identifier: BSD-3-Clause
"""Compile updates for NVIDIA's GPUs without one: ``python compiling.py 80 90``.

Prints a list in JSON, a row for each architecture and update: ``registers`` of a thread and bytes
of its ``stack`` in the machine code, ``fused`` products, ``inexact`` instructions, and ``moves`` of
values between threads in the loop over whole blocks.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preamp.kernels import Update
from preamp.kernels.rules import AdamRule, BiasCorrection, LambRule, Rule, SgdRule
from preamp.kernels.stored import Format, Stored, scales_shape
from preamp.kernels.triton import Triton, launch

SHAPE = (16, 256)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BETAS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
ADAM = AdamRule(lr=0.1, **BETAS, decoupled=True, bias_correction=BiasCorrection.MOMENTS)
LAMB = LambRule(
    lr=0.1,
    **BETAS,
    decoupled=True,
    bias_correction=True,
    grad_averaging=True,
    uses_trust_ratio=True,
)
SGD = SgdRule(
    lr=0.1,
    momentum=0.9,
    dampening=0.0,
    weight_decay=0.1,
    nesterov=False,
    decays_after_momentum=False,
)


@dataclass(frozen=True)
class Compiled:
    arch: int
    update: str
    registers: int
    stack: int
    fused: int
    inexact: int
    moves: int


def of(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(SHAPE, dtype=dtype)]


def updates() -> Iterator[tuple[str, Rule, list[list[torch.Tensor]], dict[str, Any]]]:
    """Names, rules, lists, and what the update is told."""
    yield "adam-O5", ADAM, [of(F32), of(BF16), of(F32), of(F32)], {"halves": of(BF16)}
    yield "adam-O2", ADAM, [of(F32), of(F16), of(F32), of(F32)], {"halves": of(F16)}
    yield "sgd-O2", SGD, [of(F32), of(F16), of(F32)], {"halves": of(F16)}
    yield "lamb-O5", LAMB, [of(F32), of(BF16), of(F32), of(F32)], {"halves": of(BF16)}
    for half in (BF16, F16):
        stored = Stored(lows=of(torch.int16))
        yield f"adam-split-{half}", ADAM, [of(half), of(half), of(F32), of(F32)], {"stored": stored}
    scales = [torch.ones(scales_shape(torch.Size(SHAPE)))]
    stored = Stored(
        lows=of(torch.int16),
        formats=(Format.SIGNED, Format.UNSIGNED),
        scales=(scales, scales),
        seed=1,
        numbers=[0],
        starts=[0],
    )
    lists = [of(BF16), of(BF16), of(torch.int8), of(torch.uint8)]
    yield "adam-compact", ADAM, lists, {"stored": stored}


def signature_of(kernel: Any, values: dict[str, Any]) -> dict[str, str]:
    """Triton's names of what the arguments of a launch are."""
    dtypes = {torch.int64: "*i64", torch.int32: "*i32", F32: "*fp32"}
    kinds: dict[str, str] = {}
    for param in kernel.params:
        value = values[param.name]
        if param.is_constexpr:
            kinds[param.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            kinds[param.name] = dtypes[value.dtype]
        else:
            kinds[param.name] = param.annotation_type
    return kinds


def first_loop(ttgir: str) -> str:
    """The loop over whole blocks, with all that is in it."""
    head = re.search(r"^( *)(?:\S+ = )?scf\.while.*$", ttgir, re.MULTILINE)
    assert head is not None
    end = re.compile(rf"^{head[1]}}}(?! do)", re.MULTILINE).search(ttgir, head.end())
    assert end is not None
    return ttgir[head.start() : end.end()]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack, where what is spilled lies."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [folder / "cuobjdump", "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)


def compiled(kernel: Any, values: dict[str, Any], arch: int, update: str) -> Compiled:
    names = {"num_warps", "enable_fp_fusion"} & values.keys()
    options = {name: values.pop(name) for name in names}
    made: Any = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature_of(kernel, values),
            constexprs={p.name: values[p.name] for p in kernel.params if p.is_constexpr},
        ),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )
    ptx = made.asm["ptx"]
    registers, stack = resources(made.asm["cubin"])
    return Compiled(
        arch,
        update,
        registers,
        stack,
        fused=len(re.findall(r"fma\.rn\.f(?:32|64)", ptx)),
        inexact=len(re.findall(r"div\.full|\.approx", ptx)),
        moves=len(re.findall(r"convert_layout|local_store|barrier", first_loop(made.asm["ttgir"]))),
    )


def main(archs: list[int]) -> None:
    vars(launch)["COMPILED_FOR"] = ("cpu",)
    torch.version.cuda = "13.0"  # as in torch's builds for these GPUs
    launched: list[tuple[Any, dict[str, Any]]] = []

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if kernel.fn.__name__ == "update_kernel" and not named["MEASURE"]:
            launched.append((kernel, dict(zip(kernel.arg_names, given, strict=False)) | named))

    triton.JITFunction.run = run
    found: list[Compiled] = []
    one = torch.ones(())
    for arch, (name, rule, lists, told) in itertools.product(archs, updates()):
        step = torch.ones((), dtype=torch.int32)
        update = Update(step=step, inv_scale=one, found_inf=one, **told)
        Triton().update_(*lists, rule=rule, update=update)
        found += [compiled(kernel, values, arch, name) for kernel, values in launched]
        launched.clear()
    print(json.dumps(list(map(asdict, found))))


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
