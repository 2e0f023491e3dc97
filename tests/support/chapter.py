"""Import what lies in a numbered folder: the folders are no packages, and two of them may hold a train.py."""

import importlib.util
import sys
from types import ModuleType

from support.harness import ROOT


def load(path: str) -> ModuleType:
    """The script or helper at `path`, such as "04_amp/compare.py", once per session; its neighbours import as usual."""
    file = ROOT / path
    if sys.path[0] != str(file.parent):
        sys.path.insert(0, str(file.parent))  # as python does for a script
    # a helper is known to its script under its own name, and must not exist twice
    name = file.stem if file.stem.startswith("_") else f"chapter_{file.parent.name}_{file.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
