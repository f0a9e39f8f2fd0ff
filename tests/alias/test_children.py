# SPDX-License-Identifier: BSD-3-Clause
"""Python processes that a program starts see the alias as well."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import preamp
from alias.harness import Run
from preamp.compat.alias import table
from preamp.compat.alias.finder import STARTUP

WORKERS = """
import multiprocessing, subprocess, sys
import torch
from torch.utils.data import DataLoader, Dataset

import apex
from apex import amp


class Squares(Dataset):
    '''Defined in the script, so a spawned worker unpickles it from __main__.'''

    def __len__(self):
        return 4

    def __getitem__(self, index):
        import apex
        from importlib.metadata import version
        assert version("apex") == "0.1"
        return torch.tensor(index * index), apex.amp.__name__


def worker(queue):
    from apex.amp.scaler import LossScaler
    queue.put((LossScaler.__module__, amp.__name__, __name__))


def main():
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=worker, args=(queue,))
        process.start()
        print(method, *queue.get())
        process.join()
    loader = DataLoader(Squares(), num_workers=2, multiprocessing_context="spawn", batch_size=2)
    for numbers, names in loader:
        print(numbers.tolist(), *names)


if __name__ == "__main__":
    main()
"""


@pytest.mark.full
def test_workers_of_a_script(python: Run, tmp_path: Path) -> None:
    (tmp_path / "workers.py").write_text(WORKERS, "utf-8")
    done = python("-W", "error", "-m", "preamp", "run", "workers.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "spawn preamp.compat.scaler apex.amp __mp_main__",
        "forkserver preamp.compat.scaler apex.amp __mp_main__",
        "[0, 1] apex.amp apex.amp",
        "[4, 9] apex.amp apex.amp",
    ]


@pytest.mark.full
def test_workers_of_a_module(python: Run, tmp_path: Path) -> None:
    """They import the module again by its name, not by its file."""
    short = WORKERS.replace('("spawn", "forkserver")', '("spawn",)').partition("    loader")[0]
    end = "\n\nif __name__ == '__main__':\n    main()\n"
    (tmp_path / "workers.py").write_text(short + end, "utf-8")
    done = python("-m", "preamp", "run", "-m", "workers")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "spawn preamp.compat.scaler apex.amp __mp_main__\n"


@pytest.fixture
def child(python: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Start processes as a program does that has the alias on."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    preamp.install_apex_alias()
    try:
        path = os.environ["PYTHONPATH"]
    finally:
        preamp.remove_apex_alias()

    def run(*arguments: str, **environment: str) -> object:
        return python(*arguments, **{"PYTHONPATH": path, **environment})

    return run  # type: ignore[return-value]


def test_the_roots_are_those_of_the_table() -> None:
    """The start-up file spells them out: importing the table would import torch."""
    text = (Path(STARTUP) / "sitecustomize.py").read_text("utf-8")
    roots = dict.fromkeys(name.partition(".")[0] for name in table.SUPPLIED)
    assert f"ROOTS = {tuple(roots)}".replace("'", '"') in text


def test_processes_that_need_no_apex_do_not_load_torch(child: Run) -> None:
    done = child("-c", "import sys; print('torch' in sys.modules, sys.path.count(sys.argv[1]))",
                 STARTUP)  # fmt: skip
    assert done.stdout == "False 0\n", done.stderr


FIRST_USES = (
    "import apex.amp; print(apex.amp.__name__)",
    "from apex import amp; print(amp.__name__)",
    "import importlib.metadata as m; print(m.version('apex')); import apex.amp",
    "import importlib.util as u; print(u.find_spec('apex.amp').name)",
    "import subprocess as s; s.run([sys.executable, '-c', 'import apex; print(apex)'], check=True)",
)

REMOVES_IT = """
preamp.remove_apex_alias()
assert "startup" not in os.environ.get("PYTHONPATH", "")
try:
    import apex
except ModuleNotFoundError:
    print("gone", [f for f in sys.meta_path if "preamp" in repr(f) or "Waiting" in repr(f)])
"""

INSTALLS_IT_AGAIN = """
preamp.install_apex_alias()
import apex
print([type(f).__name__ for f in sys.meta_path if "Alias" in repr(f) or "Waiting" in repr(f)])
"""

ONE_PROCESS_FOR_EACH = """
import gc, os, sys, preamp
gc.freeze()
for text in sys.argv[1:]:
    if os.fork() == 0:
        exec(text)
        sys.exit()
    assert os.wait()[1] == 0
"""


def test_each_first_use_brings_the_alias(child: Run) -> None:
    done = child("-c", ONE_PROCESS_FOR_EACH, *FIRST_USES, REMOVES_IT, INSTALLS_IT_AGAIN)
    assert done.stdout.splitlines() == [
        "apex.amp",
        "apex.amp",
        "0.1",
        "apex.amp",
        "<module 'apex' (preamp.compat.alias.root)>",
        "gone []",
        "['AliasFinder']",
    ]
    assert done.stderr == ""


@pytest.mark.full
def test_a_sitecustomize_of_ones_own_still_runs(child: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mine = __file__\n", "utf-8")
    preamp_path = os.pathsep.join(
        [STARTUP, str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = child("-c", "import sys, sitecustomize as s, apex; print(sys.mine == s.__file__)",
                 PYTHONPATH=preamp_path)  # fmt: skip
    assert done.stdout == "True\n", done.stderr


def test_an_environment_without_preamp_is_left_alone(child: Run) -> None:
    done = child("-c", """
import sys
sys.modules["preamp"] = None
try:
    import apex
except ModuleNotFoundError as error:
    print(error)
""")  # fmt: skip
    assert done.stdout == "No module named 'apex'\n", done.stderr


def test_isolated_processes_do_not_see_it(child: Run) -> None:
    """``-I`` and ``-E`` mean: whatever the environment says."""
    done = child("-I", "-c", "import apex")
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'apex'\n")


@pytest.mark.full
def test_the_launcher_of_apex_names_torchrun(child: Run) -> None:
    done = child("-m", "apex.parallel.multiproc", "rank.py")
    assert done.returncode == 1
    assert "Use torchrun, which starts one process for each GPU." in done.stderr
