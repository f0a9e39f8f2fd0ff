# SPDX-License-Identifier: BSD-3-Clause
"""A process that has imported preamp and torch, and forks a ``preamp run`` for each line it reads.

Importing torch takes longer than everything that these runs do. The fork ends by leaving this
module, so the interpreter treats its exceptions and exit handlers as always.
"""

import json
import os
import sys

from preamp.cli.main import main

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        files = (os.devnull, os.O_RDONLY), (job["out"], os.O_WRONLY), (job["err"], os.O_WRONLY)
        for number, (name, mode) in enumerate(files):
            os.dup2(os.open(name, mode), number)
        os.chdir(job["folder"])
        sys.argv = ["preamp", "run", *job["arguments"]]
        main()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
