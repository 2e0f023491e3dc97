"""Run script after script in one process, so that only the first pays for importing torch.

gpu_host.py starts this file. It connects to the socket that is its argument, and gets one job after
another, a line each:

    {"argv": [script, flags ...], "folder": folder to run in, "env": environment variables}

Each script sees what a new process would show it: arguments, environment, folder, output files,
modules of its own, torch's settings, and an allocator that holds nothing. The answer has the exit
code and the bytes that the script has left on the GPUs.
"""

import contextlib
import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Modules of scripts that have ended. The process groups in them must live as long as the process:
# common/runtime.py says why.
_ended_modules = []
end_process = os._exit


class ScriptEndsError(BaseException):
    """Raised in place of os._exit, with which exits.run ends a script."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def raise_instead_of_exit(code: int) -> None:
    """Raise ScriptEndsError: os._exit while a script runs."""
    raise ScriptEndsError(code)


def serve(requests: socket.socket) -> None:
    """Run the jobs that come through the socket, until it is closed."""
    lines = requests.makefile("rw")
    for line in lines:
        job = json.loads(line)
        code = run(job["argv"], job["folder"], job["env"])
        left_bytes = clean_up()
        lines.write(json.dumps({"code": code, "left_bytes": left_bytes}) + "\n")
        lines.flush()


def run(argv: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a script as `python argv` would in that folder, and return its exit code."""
    module_names = set(sys.modules)
    path = list(sys.path)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # TMPDIR may be another
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    for name in reversed(environment.get("PYTHONPATH", "").split(":")):
        if name:
            sys.path.insert(1, name)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT, 0o666)
        os.dup2(file, number)
        os.close(file)

    os._exit = raise_instead_of_exit
    try:
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except ScriptEndsError as end:
        code = end.code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit = end_process
    sys.stdout.flush()
    sys.stderr.flush()

    sys.path[:] = path
    forget_modules(module_names)
    return code


def forget_modules(known: set[str]) -> None:
    """Forget the modules that the script has imported, except those of installed packages."""
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None)
        if file and "site-packages" not in file and not file.startswith(sys.base_prefix):
            module = sys.modules.pop(name)
            if name == "common.runtime":
                _ended_modules.append(module)


def clean_up() -> int:
    """Reset what the script has set. Return the bytes that it has left on the GPUs."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    random.seed()
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    torch.seed()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.enabled = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = False
    sys.last_exc = sys.last_value = sys.last_traceback = None  # hold frames, and so tensors
    gc.collect()
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return 0

    if torch.cuda.get_sync_debug_mode() != 0:  # to set it prints a warning
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    left_bytes = 0
    for device in range(torch.cuda.device_count()):
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        left_bytes += torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    for device in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)
    torch.cuda.set_device(0)
    return left_bytes


def main() -> None:
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    requests.connect(sys.argv[1])
    with contextlib.suppress(ConnectionError):  # the client is gone
        serve(requests)
    end_process(0)


if __name__ == "__main__":
    main()
