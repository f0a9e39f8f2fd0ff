# SPDX-License-Identifier: BSD-3-Clause
"""Runs when Python starts in a process whose parent has the alias on.

Python imports a module of this name by itself. It must be cheap, since processes come by here
that never need torch, and it must run on any Python that an environment variable can reach.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

ROOTS = ("apex", "amp_C", "apex_C")


class WaitingFinder:
    """Installs the alias when one of its names is first asked for."""

    waits_for_apex = True

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Hand over to the alias for a module of Apex; other modules are not ours."""
        if fullname.partition(".")[0] not in ROOTS:
            return None
        finder = self._hand_over()
        return None if finder is None else finder.find_spec(fullname, path, target)

    def find_distributions(self, context: Any = None) -> Any:
        """Hand over to the alias for the distribution ``apex``."""
        if getattr(context, "name", None) != "apex":
            return iter(())
        finder = self._hand_over()
        return iter(()) if finder is None else finder.find_distributions(context)

    def _hand_over(self) -> Any:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            alias = importlib.import_module("preamp.compat.alias.finder")
        except ImportError:  # another environment, whose imports are its own affair
            return None
        alias.install_apex_alias()
        return alias.FINDER


def run_next_sitecustomize(here: str) -> None:
    """Run the module of this name that Python would have run without the alias."""
    sys.path[:] = [entry for entry in sys.path if entry != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, WaitingFinder())  # type: ignore[arg-type]
run_next_sitecustomize(os.path.dirname(os.path.abspath(__file__)))
