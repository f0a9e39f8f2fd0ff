# SPDX-License-Identifier: BSD-3-Clause
"""A process that has imported preamp and torch, and forks a ``preamp`` for each line it reads.

Importing takes longer than everything that these runs do. A fork ends by leaving this file, so
the interpreter treats its exceptions and exit handlers as always.
"""

import gc
import importlib
import json
import os
import sys
import warnings

import torch

from preamp.cli.main import main
from preamp.kernels import backend
from preamp.kernels.dispatch import lacks_numba

for name in sys.argv[1:]:
    importlib.import_module(name)
if lacks_numba() is None:  # at its first kernel numba looks through all types, for half a second
    backend("jit").cast_copy_([torch.ones(1)], [torch.zeros(1)])
gc.freeze()  # a fork that ends would look through all of torch for cycles: 1.9 s instead of 0.4
for line in sys.stdin:
    job = json.loads(line)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of threads, which torch has started
        child = os.fork()
    if child == 0:
        files = (os.devnull, os.O_RDONLY), (job["out"], os.O_WRONLY), (job["err"], os.O_WRONLY)
        for number, (path, mode) in enumerate(files):
            os.dup2(os.open(path, mode), number)
        os.chdir(job["folder"])
        sys.argv = ["preamp", *job["arguments"]]
        main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
