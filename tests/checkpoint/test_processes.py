# SPDX-License-Identifier: BSD-3-Clause
"""Processes that are killed while they save, and processes that are asked to stop."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import preamp
from preamp.checkpoint import latest_checkpoint, stop_on_signal

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("PREAMP_KILLS", "8"))


def test_killed_while_saving(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--kills", str(KILLS), "--saves", "0", "--out", str(rows)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "tools/attack_saves.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    killed = json.loads(rows.read_text(encoding="utf-8"))["kinds"]["kills"]
    assert killed["kills"] >= KILLS
    assert killed["unfinished"] > 0
    assert killed["files"] > 0


def test_what_a_killed_process_leaves_is_removed(tmp_path: Path) -> None:
    dead = tmp_path / ".step_7.safetensors.abcdefgh.part"
    for path in (dead, tmp_path / ".other_7.safetensors.abcdefgh.part", tmp_path / "mine.part"):
        path.write_bytes(b"half")
    preamp.save_checkpoint(tmp_path / "step_8.safetensors", extra=1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other_7.safetensors.abcdefgh.part", "mine.part", "step_8.safetensors"]


SCRIPT = """
import signal, sys, torch, preamp
from preamp.checkpoint import latest_checkpoint, stop_on_signal

torch.manual_seed(0)
folder, steps = sys.argv[1], int(sys.argv[2])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
path = latest_checkpoint(folder)
start = preamp.load_checkpoint(path, model, optimizer)["step"] if path else 0
with stop_on_signal() as stop:
    for step in range(start, steps):
        with preamp.scale_loss(model(torch.randn(8, 4)).float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        sys.stdin.readline()
        if stop.requested:
            preamp.save_checkpoint(
                f"{folder}/step_{step + 1}.safetensors", model, optimizer, extra={"step": step + 1},
                asynchronous=True,
            )
            stop.exit()
print([v.tolist() for v in model.state_dict().values()])
"""


def run_script(folder: Path, steps: int, kill_at: int | None = None) -> tuple[int, str]:
    """Run it step by step; send SIGTERM in the middle of step ``kill_at``."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(steps)]
    pipe, last = subprocess.PIPE, ""
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        for line in process.stdout:
            last = line
            if line.startswith("step"):
                if int(line.split()[1]) == kill_at:
                    process.send_signal(signal.SIGTERM)
                process.stdin.write("go on\n")
                process.stdin.flush()
    return process.returncode, last


@pytest.mark.full
def test_sigterm_finishes_the_step_and_saves(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "stopped")]
    status, expected = run_script(folders[0], 5)
    assert status == 0
    assert latest_checkpoint(folders[0]) is None
    status, last = run_script(folders[1], 5, kill_at=2)
    assert (status, last) == (143, "step 2\n")
    assert latest_checkpoint(folders[1]) == folders[1] / "step_3.safetensors"
    assert run_script(folders[1], 5) == (0, expected)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    with stop_on_signal(signal.SIGTERM, signal.SIGUSR1) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested
        assert stop.signal_number == signal.SIGUSR1
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == before
    with pytest.raises(SystemExit) as exit_:
        stop.exit()
    assert exit_.value.code == 128 + signal.SIGUSR1


def test_other_threads_are_refused() -> None:
    def enter() -> Any:
        assert threading.current_thread() is not threading.main_thread()
        with stop_on_signal():
            pass

    with (
        ThreadPoolExecutor(1) as threads,
        pytest.raises(preamp.PreampStateError, match="main thread"),
    ):
        threads.submit(enter).result()


def test_a_signal_that_nobody_can_catch_leaves_the_others_alone() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(OSError, match="Invalid"), stop_on_signal(signal.SIGUSR1, signal.SIGKILL):
        pass
    assert signal.getsignal(signal.SIGUSR1) == before
    with stop_on_signal(signal.SIGUSR1, signal.SIGUSR1):
        pass
    assert signal.getsignal(signal.SIGUSR1) == before
