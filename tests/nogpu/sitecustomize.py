"""Python reads this at each start of the virtualenv: with NOGPU=values, `import torch` brings nogpu_values.py, too."""

import ctypes
import importlib.abc
import importlib.util
import os
import sys


class AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load_torch = spec.loader.exec_module

        def exec_module(module):
            load_torch(module)
            importlib.import_module("nogpu_values").install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("NOGPU") == "values":
    sys.meta_path.insert(0, AfterTorch())

if os.environ.get("NOGPU_REPORT"):  # is written at exit, which the scripts' own end leaves out
    leave = os._exit

    def leave_with_report(code):
        ctypes.CDLL("libcuda.so.1").nogpu_report()
        leave(code)

    os._exit = leave_with_report
