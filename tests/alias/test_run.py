# SPDX-License-Identifier: BSD-3-Clause
"""``preamp run`` beside plain Python: the same program sees and leaves the same."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import preamp
from alias.harness import Run, call, written
from kit.refusals import assert_approved
from preamp.compat.alias import table
from preamp.compat.alias.finder import STARTUP

RUN = ("-m", "preamp", "run")

WHAT_IT_SEES = """
import __main__, json, os, sys
def spec(module):
    return module.__spec__ and [module.__spec__.name, module.__spec__.origin]
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "folder": sys.path[0],
    "path": [entry for entry in sys.path if "preamp" not in entry],
    "package": __package__,
    "spec": spec(__main__),
    "cached": __cached__,
    "doc": __doc__,
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__,
    "main": __main__.__dict__ is globals(),
    "cwd": os.getcwd(),
}))
"""


def seen(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


OPTIONS = ("--help", "-m", "--", "--x=1", "run", "")


def test_a_script_sees_what_python_shows_it(python: Run, tmp_path: Path) -> None:
    written(tmp_path, "sub/look.py", '"""Look around."""\n' + WHAT_IT_SEES)
    plain = seen(python("sub/look.py", *OPTIONS))
    assert plain["argv"] == ["sub/look.py", *OPTIONS]
    assert seen(python(*RUN, "sub/look.py", *OPTIONS)) == plain


@pytest.mark.parametrize("call", ["link.py", "-m pkg x", "-m pkg.look --help -- --x=1"])
def test_others_see_what_python_shows_them(
    call: str, python: Run, preamp_run: Run, tmp_path: Path
) -> None:
    """A package's main, a module, and a link, whose folder is that of the file."""
    for name in ("real/look.py", "pkg/__init__.py", "pkg/__main__.py", "pkg/look.py"):
        written(tmp_path, name, "" if name.endswith("init__.py") else WHAT_IT_SEES)
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "look.py")
    assert seen(preamp_run(*call.split())) == seen(python(*call.split()))


BAD_END = {
    "boom": "def f():\n    raise ValueError('é')\nf()\n",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e\n",
    "syntax": "x = 1\ny = = 2\n",
    "imported syntax": "import broken\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1 / 0\n",
    "silent": "raise SystemExit\n",
    "number": "import sys\nsys.exit(7)\n",
    "text": "import sys\nsys.exit('sorry')\n",
    "interrupted": "raise KeyboardInterrupt\n",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "os exit": "import os\nprint('x', flush=True)\nos._exit(3)\n",
    "late": "import atexit, sys\natexit.register(lambda: print(__name__, 'done'))\nsys.exit(4)\n",
}


@pytest.mark.parametrize("text", BAD_END.values(), ids=BAD_END)
def test_endings_are_those_of_python(
    python: Run, preamp_run: Run, tmp_path: Path, text: str
) -> None:
    """Exit status, what is printed, and tracebacks without a frame of preamp."""
    written(tmp_path, "broken.py", "def :\n")
    script = written(tmp_path, "end.py", text)
    plain, ours = python(script), preamp_run(script)
    assert ours.stderr == plain.stderr
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode
    if "KeyboardInterrupt" in text:
        assert ours.returncode == -signal.SIGINT


def test_a_module_that_fails(preamp_run: Run, tmp_path: Path) -> None:
    written(tmp_path, "fails.py", "import apex\n1 / 0\n")
    done = preamp_run("-m", "fails")
    assert done.returncode == 1
    assert re.findall(r'File "(.*)"', done.stderr) == [str(tmp_path / "fails.py")]


def test_threads_and_exit_handlers_still_see_the_program(preamp_run: Run, tmp_path: Path) -> None:
    """They run after the last line, and may pickle what the program defines."""
    script = written(tmp_path, "late.py", """
import atexit, pickle, threading, time
class Thing:
    pass
def use():
    time.sleep(0.1)
    print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
threading.Thread(target=use).start()
atexit.register(use)
""")  # fmt: skip
    done = preamp_run(script)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


@pytest.mark.full
def test_safe_path_is_kept(python: Run, tmp_path: Path) -> None:
    script = written(tmp_path, "look.py", "import sys\nprint(sys.path[0])\n")
    done = python(*RUN, script, PYTHONSAFEPATH="1")
    assert done.stdout == python(script, PYTHONSAFEPATH="1").stdout


# -- what cannot be started ------------------------------------------------------------------


BAD_USAGE = {
    "run nothing": [],
    "run -m": ["-m"],
    "run --": ["--"],
    "run a missing file": ["no_such_file.py"],
    "run a folder": [str(Path(__file__).parent)],
    "unknown numerics": ["--numerics", "much"],
    "an empty history": ["--history", ""],
    "a folder as history": ["--history", "."],
}


@pytest.mark.parametrize("name", BAD_USAGE)
def test_bad_usage(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.path), list(sys.meta_path)
    assert call(monkeypatch, "run", *BAD_USAGE[name]) == 2
    folder = repr(str(Path(__file__).parent))
    assert_approved("alias", name, capsys.readouterr().err.rstrip("\n"), folder=folder)
    assert (sys.path, sys.meta_path) == before


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "json.no_such"])
def test_no_such_module(preamp_run: Run, name: str) -> None:
    done = preamp_run("-m", name)
    assert done.returncode == 2
    assert_approved("alias", "run a missing module", done.stderr.rstrip("\n"), module=name)


def test_a_missing_import_of_a_package_is_not_a_missing_module(
    preamp_run: Run, tmp_path: Path
) -> None:
    written(tmp_path, "pkg/__init__.py", "import no_such_extension\n")
    written(tmp_path, "pkg/train.py", "")
    done = preamp_run("-m", "pkg.train")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_extension'\n")


def test_an_apex_with_amp_is_told_of(preamp_run: Run, tmp_path: Path) -> None:
    written(tmp_path, "apex/__init__.py", "")
    written(tmp_path, "apex/amp.py", "")
    done = preamp_run(written(tmp_path, "script.py", "print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    path = tmp_path / "apex" / "__init__.py"
    assert_approved("alias", "run with an Apex with amp", done.stderr.rstrip("\n"), path=path)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", flag) == 0
    told = capsys.readouterr().out
    assert "Usage: preamp run [OPTIONS] [script.py [argument ...]]" in told
    assert "torchrun --nproc-per-node 2 -m preamp" in told


RECORDED = """
import os, sys
import torch
from apex import amp
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
for _ in range(2):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    globals()[f"kept{_}"] = model, optimizer
print(sys.argv[1:])
"""


def test_a_run_records_what_its_options_ask_for(preamp_run: Run, tmp_path: Path) -> None:
    """Each engine into a file of its own, beside where the command was called."""
    script = written(tmp_path, "script.py", RECORDED)
    done = preamp_run("--history", "run.jsonl", "--numerics=light", script, "--history", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['--history', 'x']"
    for name in ("run.jsonl", "run-2.jsonl"):
        assert f"preamp: records go to {tmp_path / name}" in done.stdout
        lines = (tmp_path / name).read_text("utf-8").splitlines()
        kinds = {json.loads(line)["kind"] for line in lines}
        assert {"run", "step", "numerics"} <= kinds


# -- Python processes that a program starts see the alias as well -----------------------------


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
