# SPDX-License-Identifier: BSD-3-Clause
"""``python -m preamp.parallel.multiproc``: arguments, logs and exit codes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from preamp.distributed import launch
from preamp.parallel import multiproc

# No import of torch: what is started here has to be up at once.
SCRIPT = """
import os, signal, sys, time
rank = int(sys.argv[sys.argv.index("--rank") + 1])
print("rank", rank, sys.argv[1:], flush=True)
os.write(2, b"to stderr\\n")  # at once: three processes share the pipe
if "fail" in sys.argv and rank == 0:
    open("started", "w").close()
if "fail" in sys.argv and rank == 1:
    while not os.path.exists("started"):  # the first rank is ended when this one fails
        time.sleep(0.01)
    sys.exit(7)
if "die" in sys.argv and rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if "fail" in sys.argv or "die" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


@pytest.mark.apex("9.5 python -m apex.parallel.multiproc")
@pytest.mark.parametrize("flag", [["--world-size", "3"], ["--world-size=3"]], ids=len)
def test_each_rank_gets_its_number(
    script: str, flag: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([script, "--lr", "0.1", *flag]) == 0
    expected = [f"rank {i} {['--lr', '0.1', *flag, '--rank', str(i)]}\n" for i in range(3)]
    out, err = capfd.readouterr()
    assert out == expected[0]
    assert err == "to stderr\n" * 3
    assert not (tmp_path / "GPU_0.log").exists()
    assert [(tmp_path / f"GPU_{i}.log").read_text() for i in (1, 2)] == expected[1:]


@pytest.mark.apex("9.5 python -m apex.parallel.multiproc")
@pytest.mark.parametrize(("devices", "world_size"), [(0, 1), (2, 2)])
def test_one_process_per_device(
    devices: int,
    world_size: int,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
    assert launch.main([script]) == 0
    assert f"['--world-size', '{world_size}', '--rank', '0']" in capfd.readouterr().out


@pytest.mark.apex("9.5 python -m apex.parallel.multiproc")
@pytest.mark.parametrize(
    ("word", "code"), [("fail", 7), ("die", 128 + signal.SIGKILL)], ids=lambda v: str(v)
)
def test_a_failing_process_ends_the_others(word: str, code: int, script: str) -> None:
    assert launch.main([script, word, "--world-size", "2"]) == code


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            [],
            "No script was given. Allowed is a script followed by its arguments. Call python -m "
            "preamp.parallel.multiproc script.py.",
        ),
        (
            ["x.py", "--world-size", "two"],
            "--world-size two cannot be used. Allowed is a whole number from 1. Pass --world-size "
            "2 for two processes, or leave it out for one per device.",
        ),
        (["x.py", "--world-size"], "--world-size  cannot be used."),
        (["x.py", "--world-size=0"], "--world-size 0 cannot be used."),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(arguments) == 2
    assert text in capsys.readouterr().err
    with pytest.raises(ValueError, match=re.escape(text)):
        launch.read_world_size(arguments)


@pytest.mark.apex("0 apex.parallel.multiproc")
def test_as_a_module(script: str) -> None:
    assert multiproc.main is launch.main
    command = [sys.executable, "-m", "preamp.parallel.multiproc", script, "fail"]
    run = subprocess.run([*command, "--world-size", "2"], capture_output=True, timeout=60)
    assert run.returncode == 7
    assert run.stdout.startswith(b"rank 0")
