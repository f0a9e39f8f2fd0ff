# SPDX-License-Identifier: BSD-3-Clause
"""Whole training programs that have no such bug are found to have none."""

from pathlib import Path

import pytest

from alias.harness import Zygote

ROOT = Path(__file__).parents[2]
PROGRAMS = (
    ("tests/scripts/imagenet.py", "--opt-level", "O2", "--epochs", "1"),
    ("tests/scripts/dcgan.py", "--opt_level", "O1"),
    ("tests/scripts/bert.py", "--fp16", "--fp16_opt_level", "O2", "--optimizer", "fused_adam"),
    ("examples/01_minimal.py", "--steps", "20"),
    ("examples/02_accumulation_and_clipping.py", "--steps", "20"),
    ("examples/03_gan.py", "--steps", "20"),
)


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.full] if "tests/" in p[0] else []) for p in PROGRAMS],
    ids=lambda program: Path(program[0]).stem,
)
def test_a_healthy_program_is_clean(
    zygote: Zygote, tmp_path: Path, program: tuple[str, ...]
) -> None:
    script, *arguments = program
    options = ("doctor", "--steps", "20", "--strict")
    done = zygote.preamp((*options, str(ROOT / script), *arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    # Some versions of triton, loaded beforehand, say more when Python ends.
    assert done.stderr.startswith("\npreamp doctor: no findings in 20 optimizer steps\n")
