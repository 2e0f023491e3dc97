"""Run a script, and write which operators it has run on the CPU.

    cpu_operators.py REPORT SCRIPT FLAGS...

The report is one JSON object of rank 0. Operators are those of torch's dispatcher without views;
one runs on the CPU if it has tensors and all of them are there.

operators      in the whole script, by name
in_comparison  in the functions of COMPARISONS, by name
transformers   devices of the weights and inputs of each forward of a transformers model with a head
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPARISONS = {"check_tokens", "merged_error", "compare_with_transformers"}


def in_comparison() -> bool:
    """Return whether one of COMPARISONS has called what runs now."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in COMPARISONS:
            return True
        frame = frame.f_back
    return False


class OperatorsOnCPU(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators = Counter()
        self.in_comparison = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # a DTensor does the same with its shard, which is a plain tensor
        result = operator(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return result  # a DTensor's, which asks for the shape of a result and computes nothing
        devices = {tensor.device.type for tensor in tensors}
        if devices == {"cpu"} and not operator.is_view:
            name = str(operator.overloadpacket)
            self.operators[name] += 1
            if in_comparison():
                self.in_comparison[name] += 1
        return result


def main() -> None:
    report, script, *flags = sys.argv[1:]
    transformers_devices = []

    def note_devices(module: nn.Module, args: tuple, kwargs: dict) -> None:
        of_transformers = type(module).__module__.startswith("transformers.models.")
        if of_transformers and type(module).__name__.endswith("ForCausalLM"):
            tensors = [*module.parameters(), *args, *kwargs.values()]
            devices = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
            transformers_devices.append(sorted(devices))

    # torch's global hooks get no keyword arguments, so the call is wrapped instead
    call_module = nn.Module.__call__

    def noting_call(module: nn.Module, *args, **kwargs):
        note_devices(module, args, kwargs)
        return call_module(module, *args, **kwargs)

    nn.Module.__call__ = noting_call

    counted = OperatorsOnCPU()

    def write() -> None:
        found = {
            "operators": counted.operators,
            "in_comparison": counted.in_comparison,
            "transformers": transformers_devices,
        }
        if os.environ.get("RANK", "0") == "0":
            Path(report).write_text(json.dumps(found, indent=1), encoding="utf-8")

    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).resolve().parent)
    sys.path.append(str(Path(script).resolve().parents[1]))
    from common import exits

    exits.at_exit.callback(write)  # scripts end without returning
    with counted:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
