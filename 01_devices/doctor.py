"""Is this machine fit to train on? A checklist for the first day on a new machine, as code.

It checks the GPUs, the machine around them, and a job in which a process per GPU adds up numbers.
That job stays on this machine: the network between nodes is not tested, and the last line has the
command that tests it. With --script it also runs a training script to its end, and says where it
failed or hung. The script's own flags come last, after a bare `--`.

    laptop    python 01_devices/doctor.py
    ranks     python 01_devices/doctor.py --script 05_ddp/train.py --nproc 2
    cluster   srun --ntasks-per-node=1 python 01_devices/doctor.py --run-dir runs

What to look at: `fail` means that training breaks or that numbers come out wrong, `warn` that it
costs speed or may break later. Each of these has its fix on a line of its own. `skip` means that
the check was not possible here. The exit code is 1 if anything failed. On an H100 the line
`attention` should name CUDNN_ATTENTION.
Previous: show.py. Next: benchmark.py.
"""

import ctypes
import json
import os
import re
import shutil
import socket
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _machine
import torch
from _doctor import RENDEZVOUS, TORCHRUN, Check, error_of, examine_script, run_command

from common import cli, hardware, report
from common.exits import UserError
from common.report import table

REPOSITORY = Path(hardware.__file__).resolve().parents[1]
SECONDS = 150  # until a check that runs in a process of its own counts as failed
GIB = 2**30
TIME_ERROR = 5  # Linux's adjtimex returns it while nothing keeps the clock right

# --- GPUs


def check_driver(gpus: list[dict], why_none: str | None) -> Check:
    """Check that the driver answers for every GPU of this job, and is new enough for this torch."""
    lost = []
    for gpu in gpus:
        if "handle" in gpu["refused"]:
            lost.append(f"GPU {gpu['index']}: {gpu['refused']['handle']}")
    if lost:
        fix = "after an Xid in dmesg the GPU is off the bus: reboot, then replace it"
        return Check("driver", "fail", "; ".join(lost), fix)

    others = _machine.gpus_of_others(gpus)
    if not gpus:
        # a card that is on the PCI bus but that the driver does not see
        is_broken = others == 0 and _nvidia_cards() > 0
        fix = (
            "install the driver and the package that is named; in a container: docker run "
            "--gpus all; in a batch job: ask for GPUs"
        )
        return Check("driver", "fail" if is_broken else "skip", why_none, fix)

    offered = gpus[0]["cuda"]
    built = torch.version.cuda
    seen = f"runs CUDA {offered or 'n/a'}, torch was built for {built or 'none'}"
    if others > 0:
        seen += f"; {others} of {others + len(gpus)} GPUs belong to other jobs"
    fix = f"update the driver, or install a torch for CUDA {offered}"
    if not offered or not built:
        return Check("driver", "skip", seen, fix)
    # a driver runs every minor version of its major version
    too_old = int(offered.split(".")[0]) < int(built.split(".")[0])
    return Check("driver", "fail" if too_old else "ok", seen, fix)


def _nvidia_cards() -> int:
    cards = 0
    for file in Path("/sys/bus/pci/devices").glob("*/class"):
        is_display = file.read_text(encoding="utf-8").startswith("0x03")
        if is_display and "0x10de" in file.with_name("vendor").read_text(encoding="utf-8"):
            cards += 1
    return cards


def check_visible(gpus: list[dict], usable: int) -> Check:
    """Check that torch can use every GPU of the driver."""
    built = torch.version.cuda
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = f"torch {torch.__version__} for CUDA {built or 'none'} can use {usable} of {len(gpus)}"
    if visible is None:
        fix = (
            'python -c "import torch; torch.cuda.init()" says why; in a container or a batch job '
            "the devices /dev/nvidia* may be missing"
        )
    else:
        seen += f"; CUDA_VISIBLE_DEVICES={visible}"
        fix = (
            "unset CUDA_VISIBLE_DEVICES, unless GPUs are hidden on purpose; "
            "CUDA stops counting at its first entry that names no GPU"
        )
    if not built:
        fix = "install a build of torch for CUDA"
    result = "warn" if usable < len(gpus) else "ok"
    if usable == 0:
        result = "fail"
    return Check("visible GPUs", result, seen, fix)


# These programs run in processes of their own: their CUDA contexts are gone afterwards, and a hang
# becomes a result.
MULTIPLY = """
import torch
for index in range(torch.cuda.device_count()):
    matrix = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.float16)
    assert (matrix @ matrix).eq(64).all(), f"GPU {index} multiplies wrong"
"""


# Words of CUDA's errors, and the fix.
GPU_ERRORS = {
    "no kernel image": "a newer torch for a new GPU, an older one for an old GPU",
    "out of memory": "another process fills the GPU: nvidia-smi lists them",
    "busy or unavailable|exclusive": "another process holds the GPU: nvidia-smi -q -d COMPUTE",
    "ECC|uncorrectable": "the GPU's memory is broken: reboot, then replace it",
    "insufficient|too old": "update the driver, or install a torch for an older CUDA",
    "no answer in time": "the GPU hangs: dmesg says more; reboot",
}


def gpu_fix(error: str, otherwise: str) -> str:
    """Return the fix for an error of a program that uses a GPU."""
    for words, fix in GPU_ERRORS.items():
        if re.search(words, error):
            return fix
    return otherwise


def check_architecture(usable: int) -> Check:
    """Check that this torch has kernels for every GPU, by a matmul on each."""
    code, output = run_command([sys.executable, "-c", MULTIPLY], SECONDS)
    if code != 0:
        error = error_of(code, output)
        fix = gpu_fix(error, "dmesg and nvidia-smi -q say more")
        return Check("architecture", "fail", error, fix)
    architectures = " ".join(torch.cuda.get_arch_list())
    seen = f"{usable} GPUs multiply; torch is built for {architectures}"
    return Check("architecture", "ok", seen, "")


ATTENTION = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from common import hardware
facts = {"cudnn": hardware.cudnn_version(), "kernel": hardware.attention_kernel()}
facts["hopper"] = torch.cuda.get_device_capability()[0] == 9
print(json.dumps(facts))
"""


def check_attention() -> Check:
    """Check which kernel computes attention in a training step.

    On Hopper torch takes cuDNN's attention, which transformers measured 1.7 to 2.3 times as fast as
    FlashAttention 2 at training shapes (huggingface/transformers#48163). It does so only if the
    cuDNN that is loaded at run time is newer than 9.15, and falls back without a message.
    """
    fix = (
        "take an older cuDNN out of LD_LIBRARY_PATH, or install a newer one "
        "(pip install -U nvidia-cudnn-cu13); unset TORCH_CUDNN_SDPA_DEPRIORITIZED"
    )
    code, output = run_command([sys.executable, "-c", ATTENTION, REPOSITORY], SECONDS)
    if code != 0:
        error = error_of(code, output)
        return Check("attention", "fail", error, gpu_fix(error, fix))
    facts = json.loads(output.splitlines()[-1])
    kernel = facts["kernel"]
    seen = f"cuDNN {facts['cudnn'] or 'n/a'}, {kernel} in a causal bf16 training step"
    slow = kernel == "MATH" or (facts["hopper"] and kernel != "CUDNN_ATTENTION")
    return Check("attention", "warn" if slow else "ok", seen, fix)


def check_gpu_clocks(gpus: list[dict]) -> Check:
    """Check that nothing holds down the clocks of an idle GPU."""
    fix = "heat: fans, airflow, room; power: nvidia-smi -q -d POWER, and the supply's cables"
    held_down = []
    for gpu in gpus:
        if gpu["throttle_reasons"]:
            held_down.append(f"GPU {gpu['index']}: {', '.join(gpu['throttle_reasons'])}")
    seen = "; ".join(held_down) or "nothing holds them down"
    return Check("GPU clocks", "warn" if held_down else "ok", seen, fix)


def check_gpus(gpus: list[dict], why_none: str | None, usable: int) -> list[Check]:
    """Run the checks of the GPUs. A check whose precondition failed is left out."""
    checks = [check_driver(gpus, why_none)]
    if gpus:
        checks.append(check_visible(gpus, usable))
        checks.append(check_gpu_clocks(gpus))
    if gpus and usable > 0:
        checks.append(check_architecture(usable))
        if checks[-1].result == "ok":
            checks.append(check_attention())
    return checks


# --- the machine


def check_versions() -> Check:
    """Check that the installed packages are those of requirements.txt."""
    requirements = Path(__file__).resolve().parents[1] / "requirements.txt"
    installed = {}
    for distribution in distributions():
        # the first one found is the one that Python imports
        name = distribution.name.replace("_", "-")
        installed.setdefault(name, distribution.version.split("+")[0])
    different = []
    text = requirements.read_text(encoding="utf-8").replace("_", "-")
    for name, pin in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE):
        if installed.get(name) != pin:
            different.append(f"{name} {installed.get(name, 'missing')} (pinned {pin})")
    seen = ", ".join(different) or "all as pinned"
    return Check("versions", "warn" if different else "ok", seen, "pip install -r requirements.txt")


def check_shared_memory() -> Check:
    """Check /dev/shm, through which data loading workers pass batches.

    A container has 64 MiB by default, and a worker that needs more dies of a bus error.
    """
    fix = (
        "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory; "
        "or --num-workers 0"
    )
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "skip", "there is no /dev/shm", fix)
    free = shutil.disk_usage("/dev/shm").free / GIB
    result = "ok"
    if free < 1:
        result = "warn"
    if free < 0.125:
        result = "fail"
    return Check("shared memory", result, f"{free:.2f} GiB free", fix)


def check_disk(run_dir: Path) -> Check:
    """Check that checkpoints can be written to the folder of the runs."""
    folder = run_dir.resolve()
    while not folder.is_dir():  # a run makes its folder
        folder = folder.parent
    free = shutil.disk_usage(folder).free / GIB
    writable = os.access(folder, os.W_OK)
    result = "ok"
    if free < 10:
        result = "warn"
    if free < 1 or not writable:
        result = "fail"
    seen = f"{folder}: {free:.0f} GiB free"
    if not writable:
        seen += ", not writable"
    return Check("disk", result, seen, "another --run-dir; --keep fewer checkpoints")


def check_clock() -> Check:
    """Check that the system clock is synchronized. TLS and Slurm's munge fail if it is wrong."""
    fix = "start chrony or systemd-timesyncd on the host"
    if sys.platform != "linux":
        return Check("clock", "skip", "only Linux reports this", fix)
    request = ctypes.create_string_buffer(512)  # struct timex; all zeros only asks
    state = ctypes.CDLL(None).adjtimex(request)
    if state < 0:
        return Check("clock", "skip", "the container does not allow the question", fix)
    if state == TIME_ERROR:
        return Check("clock", "warn", "not synchronized", fix)
    return Check("clock", "ok", "synchronized", fix)


# --- a job

# Settings of the environment that slow down or change a job, and what they do.
SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "NCCL_P2P_DISABLE": "GPUs exchange data through the CPU's memory",
    "NCCL_SHM_DISABLE": "processes of a node exchange data through the network",
    "NCCL_IB_DISABLE": "nodes do not use InfiniBand",
    "NVIDIA_TF32_OVERRIDE": "scripts cannot choose between fp32 and tf32",
}


def check_environment(gpus: int) -> Check:
    """Check the variables that torchrun sets, and those in SETTINGS.

    A job in which one of torchrun's variables was set by hand, and wrong, waits until its timeout.
    """
    wrong = wrong_variables(gpus)
    if wrong:
        fix = f"unset them and start with torchrun, or set all: {', '.join(RENDEZVOUS)}"
        return Check("environment variables", "fail", wrong, fix)
    unusual = []
    for name, effect in SETTINGS.items():
        if os.environ.get(name, "0") != "0":
            unusual.append(f"{name}: {effect}")
    fix = "unset what is not set on purpose"
    seen = "; ".join(unusual) or "none is wrong"
    return Check("environment variables", "warn" if unusual else "ok", seen, fix)


def wrong_variables(gpus: int) -> str:
    """Return what is wrong with the variables of RENDEZVOUS, or an empty string."""
    given = {name: os.environ[name] for name in RENDEZVOUS if name in os.environ}
    missing = [name for name in RENDEZVOUS if name not in given]
    if given.keys() <= {"MASTER_ADDR", "MASTER_PORT"} and missing:
        return ""  # a batch script may prepare the address and the port alone
    if missing:
        return f"half set: without {', '.join(missing)}"
    try:
        rank = int(given["RANK"])
        world_size = int(given["WORLD_SIZE"])
        local_rank = int(given["LOCAL_RANK"])
        port = int(given["MASTER_PORT"])
        socket.getaddrinfo(given["MASTER_ADDR"], port)
    except (OSError, ValueError) as error:  # no such host, or not a number
        return f"{given}: {error}"
    ranks_fit = 0 <= local_rank <= rank < world_size
    gpu_exists = gpus == 0 or local_rank < gpus
    if ranks_fit and gpu_exists and 0 < port < 65536:
        return ""
    return f"{given} with {gpus} GPUs"


def check_port() -> Check:
    """Check that rank 0 can listen on the port at which the ranks meet."""
    # older versions of torchrun take 29500 without --standalone and --rdzv-endpoint
    port = os.environ.get("MASTER_PORT", "29500")
    if torch.distributed.is_torchelastic_launched():
        return Check("port", "skip", f"torchrun listens at {port}", "")
    taken = False
    if port.isdecimal() and int(port) < 65536:
        with socket.socket() as probe:
            taken = probe.connect_ex(("localhost", int(port))) == 0
    result = "ok"
    if taken:
        result = "fail" if "MASTER_PORT" in os.environ else "warn"
    seen = f"{port} is {'taken' if taken else 'free'}"
    return Check("port", result, seen, "end what listens there, or set another MASTER_PORT")


def check_host_name() -> Check:
    """Check that the name of this machine has an address, which torchrun asks for."""
    name = socket.gethostname()
    fix = (
        f"add `127.0.0.1 {name}` to /etc/hosts, or use torchrun --local-addr=127.0.0.1, as the "
        "files in launch/ do: without it torchrun asks for the name without end"
    )
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return Check("host name", "fail", f"{name} has no address ({error.strerror})", fix)
    return Check("host name", "ok", f"{name} is {address}", fix)


ALL_REDUCE = """
import datetime, faulthandler, os, sys, torch, torch.distributed as dist
faulthandler.dump_traceback_later(120, exit=True)
backend = sys.argv[1]
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
device = None
if backend == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
timeout = datetime.timedelta(seconds=60)
dist.init_process_group(backend, timeout=timeout, device_id=device)
numbers = torch.full((2**20,), rank + 1.0, device=device)
dist.all_reduce(numbers)
expected = world_size * (world_size + 1) / 2
assert numbers.eq(expected).all(), f"1 + ... + {world_size} came out wrong"
dist.barrier()
os._exit(0)  # gloo's threads can crash Python's shutdown
"""


# All-reduces of all GPUs of two nodes. It prints rates, to compare with the network's.
TEST_OF_NETWORK = """\
not tested: the network between nodes. Run this on each of two, with the name of one in $HEAD:
    torchrun --nnodes=2 --nproc_per_node={} --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 \\
        --rdzv-id=network 05_ddp/collectives.py"""


def check_all_reduce(backend: str, processes: int) -> Check:
    """Check that processes of this machine find each other and add up numbers."""
    launcher = [*TORCHRUN, f"--nproc_per_node={processes}", "--no-python"]
    argv = [*launcher, sys.executable, "-c", ALL_REDUCE, backend]
    code, output = run_command(argv, SECONDS)
    fix = (
        f"{backend.upper()}_SOCKET_IFNAME=<an interface that is up>; the firewall; "
        "NCCL_DEBUG=INFO says more"
    )
    if code != 0:
        error = error_of(code, output)
        if backend == "nccl":
            fix = gpu_fix(error, fix)
        return Check(f"{backend} all-reduce", "fail", error, fix)
    return Check(f"{backend} all-reduce", "ok", f"{processes} processes agree", fix)


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--script", type=Path, help="a training script to run")
    add("--nproc", type=cli.positive_int, default=1, help="ranks of --script, under torchrun")
    add("--timeout", type=cli.positive, default=300, help="seconds until --script counts as hung")
    add("--run-dir", type=Path, default=Path("runs"), help="whose disk to check (default: runs)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write every check as JSON")
    add("flags", nargs="*", metavar="-- FLAG", help="flags of --script")
    args = parser.parse_args()
    if args.script and not args.script.is_file():
        raise UserError(f"--script {args.script} is not a file")
    start = time.monotonic()

    gpus, why_none = _machine.gpus()
    usable = 0
    if torch.cuda.is_available():  # device_count also counts GPUs whose driver is too old
        usable = torch.cuda.device_count()
    processes = {"gloo": 2}
    if usable > 1:
        processes["nccl"] = usable
    checks = check_gpus(gpus, why_none, usable)
    checks += [check_versions(), check_shared_memory(), check_disk(args.run_dir), check_clock()]
    checks += [check_environment(usable), check_port(), check_host_name()]
    checks += [check_all_reduce(backend, count) for backend, count in processes.items()]
    if args.script:
        checks.append(examine_script(args.script, args.flags, args.nproc, args.timeout))

    rows = [[check.name, check.result, check.seen] for check in checks]
    print(table([["check", "result", "seen"], *rows]))
    for check in checks:
        if check.result in ("warn", "fail"):
            print(f"{check.result}: {check.name}: {check.fix}")
    failures = sum(check.result == "fail" for check in checks)
    warnings = sum(check.result == "warn" for check in checks)
    print(f"{failures} failures, {warnings} warnings")
    print(TEST_OF_NETWORK.format(max(1, usable)))

    keys = ("check", "result", "seen", "fix")
    summary = {
        "device": (gpus[0]["name"] or "cuda") if gpus else "cpu",
        "world_size": args.nproc,
        "seconds": time.monotonic() - start,
        "checks": [dict(zip(keys, check, strict=True)) for check in checks],
        "failures": failures,
        "warnings": warnings,
    }
    report.write_json(summary, args.json)
    return min(1, failures)


if __name__ == "__main__":
    exits.run(main)
