"""What doctor.py asks of the machine without its GPUs: memory limits, disk, versions, the cache of compiled code.

A check is a function that returns (name, ok | warn | fail | skip, what was seen, the fix). fail: it breaks, or
numbers come out wrong; warn: it costs speed, or may break later.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import tomllib
from pathlib import Path

Check = tuple[str, str, str, str]


def shared_memory(path: Path = Path("/dev/shm"), least: int = 2**27, enough: int = 2**30) -> Check:
    """Workers hand batches over in it; a container has 64 MiB unless told otherwise, and then dies of a bus error."""
    name = "shared memory"
    if not path.is_dir():
        return name, "skip", f"no {path} here", ""
    total, _, free = shutil.disk_usage(path)
    status = "fail" if free < least else "warn" if free < enough else "ok"
    fix = "docker run --shm-size=8g (or --ipc=host), Kubernetes: an emptyDir of medium Memory; or --num-workers 0"
    seen = f"{path}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB free"
    return name, status, seen, "" if status == "ok" else fix


def open_files(limit: int) -> Check:
    if limit == resource.RLIM_INFINITY or limit >= 4096:
        return "open files", "ok", f"limit {'none' if limit == resource.RLIM_INFINITY else limit}", ""
    fix = "ulimit -n 65536 (each tensor that a worker hands over holds a file open)"
    return "open files", "warn" if limit >= 256 else "fail", f"limit {limit}", fix


def locked_memory(limit: int, rdma: Path = Path("/dev/infiniband")) -> Check:
    """The CUDA driver pins memory past this limit; network cards that read memory themselves, InfiniBand, do not."""
    name, cards = "pinned memory", sorted(card.name for card in rdma.glob("uverbs*") if os.access(card, os.R_OK))
    if limit == resource.RLIM_INFINITY:
        return name, "ok", "no limit", ""
    seen = f"limit {limit / 2**20:g} MiB, RDMA cards: {', '.join(cards) or 'none'}"
    status, fix = ("warn", "ulimit -l unlimited (docker run --ulimit memlock=-1)") if cards else ("ok", "")
    return name, status, seen, fix


def rates(folder: Path, size: int = 2**24) -> tuple[float, float]:
    """Bytes per second of a small write, done when the disk says so, and of reading it back after this kernel was told
    to drop it from its cache; what is below, an overlay or the host of a virtual machine, may have it in its own."""
    with tempfile.TemporaryFile(dir=folder) as file:
        data = os.urandom(size)
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        file.read()
        return size / (written - start), size / (time.perf_counter() - begin)


def disk(run_dir: Path, least: int = 2**30, enough: int = 10 * 2**30, slow: float = 50e6) -> Check:
    name, folder = "disk", run_dir.resolve()
    while not folder.is_dir():
        folder = folder.parent
    try:
        write, read = rates(folder)
    except OSError as error:
        return name, "fail", f"{folder}: {error.strerror}", "another --run-dir"
    free = shutil.disk_usage(folder).free
    status = "fail" if free < least else "warn" if free < enough or min(write, read) < slow else "ok"
    seen = f"{folder}: {free / 2**30:.0f} GiB free, writes {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
    fix = "another --run-dir, a local disk; --keep fewer checkpoints; --async-save"
    return name, status, seen, "" if status == "ok" else fix


def python_version(project: Path) -> Check:
    wanted = tomllib.loads(project.read_text())["project"]["requires-python"].removeprefix(">=")
    new_enough = sys.version_info[:2] >= tuple(int(part) for part in wanted.split("."))
    status, fix = ("ok", "") if new_enough else ("fail", f"make PYTHON=python{wanted} train")
    return "Python", status, f"{platform.python_version()}, at least {wanted}", fix


def packages(requirements: Path) -> Check:
    """Other versions may well work, but nobody has tried; torch 2.11 is tried too."""
    pins, off = re.findall(r"^([\w.-]+)==([\w.]+)", requirements.read_text(), re.MULTILINE), []
    for package, pinned in pins:
        try:
            found = importlib.metadata.version(package).split("+")[0]  # 2.13.0+cpu is 2.13.0
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != pinned and not (package == "torch" and found.startswith("2.11.")):
            off.append(f"{package} {found} (pinned {pinned})")
    if off:
        return "packages", "warn", ", ".join(off), f"pip install -r {requirements.name}"
    return "packages", "ok", f"all {len(pins)} as pinned", ""


def is_cut(file: Path) -> bool:
    """Whether an ELF file ends before the end of its table of sections, which a linker writes last."""
    with file.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return True
    [start], [size, count] = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return start + size * count > file.stat().st_size


def compile_cache(folder: Path) -> Check:
    """A compile that is killed leaves a part of a library there, and those after it end with "file too short"."""
    name, libraries, cut = "compile cache", sorted(folder.rglob("*.so")) if sys.platform == "linux" else [], []
    for file in libraries:
        with contextlib.suppress(OSError):  # deleted by now, or another user's
            cut += [str(file)] if is_cut(file) else []
    if cut:
        return name, "fail", f"truncated: {', '.join(cut)}", f"rm {' '.join(cut)}"
    return name, "ok", f"{folder}: {len(libraries)} libraries, none truncated", ""


def checks(run_dir: Path) -> list[Check]:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # not above: a second of imports

    repo = Path(__file__).resolve().parents[1]
    return [
        shared_memory(),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        disk(run_dir),
        python_version(repo / "pyproject.toml"),
        packages(repo / "requirements.txt"),
        compile_cache(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())),
    ]
