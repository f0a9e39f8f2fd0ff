# SPDX-License-Identifier: BSD-3-Clause
"""Build the wheel, install it with its commands into an empty environment, and use it there.

Nothing of the repository is in reach of what runs there but the pages whose code is run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/from-torch-amp.md")  # their Python blocks are run


def main() -> int:
    """Build, install, run; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="folder for the wheel and the environment")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            python = install(build(folder), folder / "env")
            use(python, folder / "elsewhere")
        except subprocess.CalledProcessError as error:
            print(f"failed with status {error.returncode}: {error.cmd}", file=sys.stderr)
            return 1
    print("the wheel works without the repository")
    return 0


def build(folder: Path) -> Path:
    """Build the wheel; returns its path."""
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    pip("wheel", "--no-deps", "--wheel-dir", str(folder / "wheel"), str(ROOT))
    (wheel,) = (folder / "wheel").glob("preamp-*.whl")
    return wheel


def install(wheel: Path, env: Path) -> Path:
    """Install the wheel and its extras into a new environment; returns its interpreter."""
    # By the pip that is here, since some systems ship Python without the means to make another.
    venv.create(env, clear=True, with_pip=False, symlinks=True)
    python = env / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    pip("--python", str(python), "install", "-c", constraints, f"{wheel}[cli,cpu,report]")
    return python


def use(python: Path, folder: Path) -> None:
    """Run the command and the pages in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    preamp = str(python.parent / "preamp")
    where = "import preamp, sys; sys.exit(not preamp.__file__.startswith(sys.prefix))"
    call([str(python), "-c", where], folder)
    call([preamp, "--version"], folder)
    call([preamp, "estimate", "--params", "7e9"], folder)
    for page in PAGES:
        copy = folder / Path(page).name
        shutil.copy(ROOT / page, copy)
        call(
            [str(python), "-W", "error", str(ROOT / "tools" / "code_blocks.py"), str(copy)], folder
        )


def pip(*arguments: str) -> None:
    """Call the pip of this interpreter."""
    quiet = ("--quiet", "--disable-pip-version-check")
    call([sys.executable, "-m", "pip", *quiet, *arguments], ROOT)


def call(command: Sequence[str], folder: Path) -> None:
    """Run a command without the repository on the path of its imports; raises where it fails."""
    print("$", *(Path(command[0]).name, *command[1:]), flush=True)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    subprocess.run(command, cwd=folder, env={**env, "OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    sys.exit(main())
