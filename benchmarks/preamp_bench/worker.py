# SPDX-License-Identifier: BSD-3-Clause
"""A training in a process of its own, one step whenever it is asked for.

preamp's casts of an O1 engine and its wide float16 products hold for a whole process, so a loop
written by hand must not share one with preamp. It also gives each loop a peak memory of its own.

The process reads lines from its input: ``step`` is answered by seconds, ``memory`` by bytes. The
end of the input ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import torch

import preamp
from preamp.core.tensors import stored_grad
from preamp_bench.harness import stopwatch, wait_for
from preamp_bench.loops import Loop, make_loop
from preamp_bench.memory import Peak, bytes_of
from preamp_bench.tasks import TaskConfig, make_task

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_MAX_": "0"}
"""Lets glibc keep what a step frees for the next one.

By default it hands large blocks back to the system or not, depending on where they lie: the very
same loop then takes 20 page faults a step in one process, 1,300 in another, and a fifth more time.
"""


class WorkerError(RuntimeError):
    """The loop in the worker failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker trains."""

    task: TaskConfig  # the task
    way: str  # see `preamp_bench.loops.make_loop`
    level: str  # the opt level


class Worker:
    """The other end of such a process; a context manager that ends it."""

    def __init__(self, job: Job) -> None:
        """Start the process; it is ready when the first step is answered."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        path = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "preamp_bench.worker", json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | KEEP_MEMORY | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def __enter__(self) -> Worker:
        """Return the worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.communicate()
        self._errors.close()

    def step(self) -> float:
        """Train one step.

        Raises:
            WorkerError: The loop raised.
        """
        return self._ask("step")

    def memory(self) -> dict[str, Any]:
        """Train one step more and measure memory.

        Raises:
            WorkerError: The loop raised.
        """
        return self._ask("memory")

    def _ask(self, question: str) -> Any:
        pipes = self._process.stdin, self._process.stdout
        answer = ""
        if pipes[0] is not None and pipes[1] is not None:
            with suppress(BrokenPipeError):  # it has ended; the reason is in its errors
                print(question, file=pipes[0], flush=True)
                answer = pipes[1].readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise WorkerError(lines[-1] if lines else f"exit status {self._process.returncode}")
        return json.loads(answer)


def serve(job: Job, questions: IO[str], answers: IO[str]) -> None:
    """Train as asked.

    Mutates:
        torch's number of threads, which becomes one.
    """
    torch.set_num_threads(1)
    device = torch.device(job.task.device)
    peak = Peak(device)
    loop = make_loop(make_task(job.task), job.way, job.level)
    seconds = stopwatch(partial(_step, loop), synchronize=partial(wait_for, device))
    for question in questions:
        answer = seconds() if question.strip() == "step" else _memory(loop, peak)
        print(json.dumps(answer), file=answers, flush=True)


def _step(loop: Loop) -> None:
    loop.backward()
    loop.update()


def _memory(loop: Loop, peak: Peak) -> dict[str, Any]:
    """Read the peak first: counting may allocate."""
    highest = peak.bytes()
    loop.backward()
    weights = list(loop.model.parameters())
    parameters = sum(p.numel() for p in weights)
    own = {id(p) for p in weights}
    # Those of a loop by hand, or what preamp updates in place of half weights.
    masters = [p for p in preamp.master_params(loop.optimizer) if id(p) not in own]
    # Reading .grad of a lazy master would make the gradient that is being looked for.
    made = [p for p in masters if stored_grad(p) is not None]
    held = {
        "weights": weights,
        "masters": masters,
        "gradients": [p.grad for p in (*weights, *made)],
        "optimizer_state": [t for e in loop.optimizer.state.values() for t in e.values()],
    }
    counted = {name: bytes_of(tensors) / parameters for name, tensors in held.items()}
    loop.update()
    return {"peak_bytes": highest, "parameters": parameters, **counted}


def _main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(task=TaskConfig(**fields["task"]), way=fields["way"], level=fields["level"])
    serve(job, sys.stdin, sys.stdout)


if __name__ == "__main__":
    _main()
