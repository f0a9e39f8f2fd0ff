# SPDX-License-Identifier: BSD-3-Clause
"""Compile kernels for NVIDIA's GPUs without one: ``python compiling.py 80 90``.

Prints in JSON a list of ``updates``, a row for each architecture and update: ``registers`` of a
thread and bytes of its ``stack`` in the machine code, ``fused`` products, ``inexact`` instructions,
and ``moves`` of values between threads in the loop over whole blocks. And by the names of all
kernels what is ``narrow`` in them, instructions that make addresses from what has 32 bits, what is
``specialised``, parameters whose values make other kernels, and, of lists of bfloat16 alone, how
many loads and stores are ``wide``, of 16 bytes.
"""

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

from cases.rules import BF16, F16, F32, FUSED, ROWS
from cases.stored import Case
from preamp.kernels import Update
from preamp.kernels.rules import Rule
from preamp.kernels.triton import Triton, launch

ADAM = FUSED[0]
LAMB = next(
    row for row in ROWS if row.op == "lamb_" and row.rule.decoupled and row.rule.uses_trust_ratio
)
SGD = next(row for row in ROWS if row.op == "sgd_" and row.rule.momentum)
NOVOGRAD = next(row for row in ROWS if row.op == "novograd_")


@dataclass(frozen=True)
class Compiled:
    arch: int
    update: str
    registers: int
    stack: int
    fused: int
    inexact: int
    moves: int


def updates() -> Iterator[tuple[str, Rule, list[list[torch.Tensor]], dict[str, Any]]]:
    """Names, rules, lists, and what the update is told."""
    for name, row, half in (
        ("adam-O5", ADAM, BF16),
        ("adam-O2", ADAM, F16),
        ("sgd-O2", SGD, F16),
        ("lamb-O5", LAMB, BF16),
    ):
        wide, halves = [torch.ones(16, 256)], [torch.ones(16, 256, dtype=half)]
        yield name, row.rule, [wide, halves, *[wide] * row.states], {"halves": halves}
    halves = [torch.ones(16, 256, dtype=BF16)]
    yield "adam-bfloat16", ADAM.rule, [halves] * 4, {}
    for name, half, kind in (
        ("adam-split-bfloat16", BF16, "float32"),
        ("adam-split-float16", F16, "float32"),
        ("adam-compact", BF16, "8bit"),
    ):
        case = Case.of(ADAM, half, kind)
        yield name, ADAM.rule, case.lists, {"stored": case.stored}


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


def narrow(ttir: str) -> list[str]:
    """Instructions by which a program, or where its chunk begins, has 32 bits in an address.

    Within a chunk 32 bits are enough, so the offsets of a vector may have them. So may constants
    and the number of programs, which are added to addresses of small tables.
    """
    small = re.findall(r"(%\S+) = (?:arith.constant|tt.get_num_programs)", ttir)
    programs = re.findall(r"(%\S+) = tt.get_program_id", ttir)
    found: list[str] = []
    for line in ttir.splitlines():
        code = line.split(" loc(")[0].strip()
        offset = re.search(r"tt.addptr %\S+, (%\S+) .*: !tt.ptr<\w+>, i32$", code)
        narrows = offset is not None and offset[1] not in small
        used = [name for name in programs if re.search(rf" {name}\b", code.partition("= ")[2])]
        if narrows or (used and "arith.extsi" not in code):
            found.append(code)
    return found


def specialised(kernel: Any) -> list[str]:
    return [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)]


def wide(ptx: str) -> int:
    return len(re.findall(r"(?:ld|st)\.global\.v(?:4\.b32|2\.b64)", ptx))


def made_of(kernel: Any, values: dict[str, Any], arch: int) -> Any:
    """What Triton compiles of a launch."""
    names = {"num_warps", "enable_fp_fusion"} & values.keys()
    options = {name: values.pop(name) for name in names}
    return triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature_of(kernel, values),
            constexprs={p.name: values[p.name] for p in kernel.params if p.is_constexpr},
        ),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )


def compiled(made: Any, arch: int, update: str) -> Compiled:
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


def use_all_others(ops: Triton) -> None:
    """Start every kernel but that of most updates, and this one where it measures."""
    wide, half, one = [torch.ones(16, 256)], [torch.ones(16, 256, dtype=F16)], torch.ones(())
    ops.census([torch.ones(5, dtype=BF16)], one.device)
    ops.census(half, one.device, with_norm=True)
    ops.l2norms(wide, one, one.device)
    ops.axpby_(wide, one, wide, 2.0, half)
    ops.widen_add(half, [one], [None])
    low = [torch.ones(16, 256, dtype=torch.int16)]
    ops.split_(wide, half, low)
    ops.join_(half, low, wide)
    ops.take_over_(wide, half)
    ops.update_(wide, half, wide, wide, rule=LAMB.rule, update=Update(step=1))
    ops.update_(wide, half, wide, [one], rule=NOVOGRAD.rule, update=Update(step=1))


def main(archs: list[int]) -> None:
    vars(launch)["COMPILED_FOR"] = ("cpu",)
    launched: list[tuple[Any, dict[str, Any]]] = []

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launched.append((kernel, dict(zip(kernel.arg_names, given, strict=False)) | named))

    triton.JITFunction.run = run
    found: list[Compiled] = []
    narrows: dict[str, set[str]] = {}
    kinds: dict[str, list[str]] = {}
    vectors: dict[str, int] = {}
    one = torch.ones(())
    for arch, (name, rule, lists, told) in itertools.product(archs, updates()):
        step = torch.ones((), dtype=torch.int32)
        update = Update(step=step, inv_scale=one, found_inf=one, **told)
        Triton().update_(*lists, rule=rule, update=update)
        for kernel, values in launched:
            if kernel.fn.__name__ == "update_kernel" and not values["MEASURE"]:
                made = made_of(kernel, values, arch)
                found.append(compiled(made, arch, name))
                if name == "adam-bfloat16":
                    vectors["update_kernel"] = wide(made.asm["ptx"])
                narrows.setdefault("update_kernel", set()).update(narrow(made.asm["ttir"]))
        launched.clear()
    use_all_others(Triton())
    for kernel, values in launched:
        made = made_of(kernel, values, archs[0])
        narrows.setdefault(kernel.fn.__name__, set()).update(narrow(made.asm["ttir"]))
        kinds[kernel.fn.__name__] = specialised(kernel)
        if kernel.fn.__name__ == "measure_chunks":
            vectors.setdefault("measure_chunks", wide(made.asm["ptx"]))
    rows = list(map(asdict, found))
    told = {"updates": rows, "narrow": {k: sorted(v) for k, v in narrows.items()}}
    print(json.dumps(told | {"specialised": kinds, "wide": vectors}))


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
