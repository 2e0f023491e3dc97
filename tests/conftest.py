"""The GPU side of pytest: polite on a shared box, loud when nothing ran.

A test marked `@pytest.mark.gpu(n=2)` gets the two GPUs with the most free memory among those that
CUDA_VISIBLE_DEVICES allows, with a file lock on each, so that two people's runs wait for each other
instead of colliding. Without enough GPUs it is skipped and says why. The fixture `gpus` is the
environment to start subprocesses in: they see these GPUs and no other. With xdist's -n the workers of
one run share the GPUs that the run has locked.

    pytest           everything that can run here; on a machine without GPU the gpu tests are skipped
    pytest -m gpu    the gpu tests; exit status 5 if not one of them ran
    pytest -m "gpu and not slow"    without large models and compiling
"""

import contextlib
import functools
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
from support import gpu_host, harness, nogpu
from support.chapter import load

LOCK_WAIT_SECONDS = 600  # for another run to be done with its GPUs
NOTHING_RAN = 5  # pytest's own exit status for "no tests"
MOST_GPUS = 2  # that a test asks for
SHARED = "GPU_TESTS_SHARED"  # environment variable: the UUIDs that xdist's workers share

# by GPU UUID: kept from test to test, or a waiting run would never get in
_held: dict[str, filelock.FileLock] = {}
_selected: list[str] = []  # gpu-marked tests of this session
_ran: list[str] = []
_skipped: dict[str, str] = {}  # test: reason


class NoGpus(Exception):
    """Why there are none to use, in words for the skip."""


def visible_gpus() -> dict[str, int]:
    """Free bytes by UUID of the GPUs that CUDA_VISIBLE_DEVICES allows. NoGpus with the reason if there are none."""
    found, why = load("01_devices/_machine.py").gpus()  # here, for it imports torch
    if not found:
        raise NoGpus(why)
    free = {}
    for gpu in found:
        if gpu["uuid"] is None or gpu["memory_used_bytes"] is None:
            raise NoGpus(f"NVML cannot read GPU {gpu['index']}: {gpu['refused']}")
        free[gpu["uuid"]] = gpu["memory_total_bytes"] - gpu["memory_used_bytes"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = _allowed(list(free), visible)
    if not allowed:
        raise NoGpus(f"CUDA_VISIBLE_DEVICES={visible!r} allows none of {len(free)} GPUs")
    import torch

    if not torch.cuda.is_available():
        raise NoGpus(
            f"torch {torch.__version__} cannot use a GPU here: a build without CUDA, or too old a driver"
        )
    return {uuid: free[uuid] for uuid in allowed}


def _allowed(uuids: list[str], visible: str | None) -> list[str]:
    """The UUIDs that a CUDA_VISIBLE_DEVICES names by index or by (the start of a) UUID; None allows all."""
    if visible is None:
        return uuids
    chosen = []
    for entry in visible.split(","):
        name = entry.strip()
        # NVML counts in the order of the bus, as CUDA does where all GPUs are equal
        if name.isdecimal():
            matches = uuids[int(name) : int(name) + 1]
        else:
            matches = [uuid for uuid in uuids if name and uuid.startswith(name)]
        if len(matches) != 1:
            break  # CUDA too stops at the first entry that names no GPU
        chosen += matches
    return list(dict.fromkeys(chosen))


def take_gpus(n: int) -> list[str]:
    """Lock n GPUs, freest first, and return their UUIDs. NoGpus if there are too few or others keep them."""
    if SHARED in os.environ:
        shared = os.environ[SHARED].split(",")
        if len(shared) < n:
            raise NoGpus(f"needs {n} GPUs, this run has locked {len(shared)}")
        return shared[:n]
    gpus = visible_gpus()
    if len(gpus) < n:
        raise NoGpus(f"needs {n} GPUs, {len(gpus)} to be seen here")
    for uuid in [*_held][n:]:
        _held.pop(uuid).release()
    freest = sorted(gpus, key=gpus.__getitem__, reverse=True)
    for uuid in freest:
        if len(_held) < n and uuid not in _held:
            _lock(uuid, 0)
    if len(_held) < n:
        # wait with empty hands and in one order for all: two runs cannot then each hold what the other wants
        release_gpus()
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        for uuid in sorted(freest[:n]):
            if not _lock(uuid, max(0.0, deadline - time.monotonic())):
                release_gpus()
                raise NoGpus(f"GPU {uuid} was in use by another test run for {LOCK_WAIT_SECONDS} s")
    return list(_held)


def _lock(uuid: str, timeout: float) -> bool:
    # any user may take the lock: on a shared box the first to come owns the file
    lock = filelock.FileLock(
        os.path.join(tempfile.gettempdir(), f"gpu-tests-{uuid}.lock"), mode=0o666
    )
    try:
        lock.acquire(timeout=timeout)
    except filelock.Timeout:
        return False
    # the umask took the others' permission away; not ours to change if not ours
    with contextlib.suppress(OSError):
        os.chmod(lock.lock_file, 0o666)
    _held[uuid] = lock
    return True


def release_gpus() -> None:
    while _held:
        _held.popitem()[1].release()


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment for the subprocesses of a gpu-marked test: the GPUs that are locked for it, no other."""
    marker = request.node.get_closest_marker("gpu")
    assert marker is not None, "the fixture gpus is for tests marked gpu"
    try:
        uuids = take_gpus(marker.kwargs.get("n", 1))
    except NoGpus as reason:
        pytest.skip(f"GPU: {reason}")
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(uuids)}


@pytest.fixture
def gpu_run(gpus: dict[str, str]) -> Callable[..., harness.Result]:
    """Run a script on the locked GPUs, in a process that other tests use, too: see gpu_host."""
    return functools.partial(gpu_host.run, gpus=gpus)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """once(name, work, *inputs): work(folder, *inputs), done by the first of xdist's workers to ask, kept for all."""
    workers = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp().parent if workers else tmp_path_factory.mktemp("once")

    @functools.cache
    def result(name: str, work: Callable, *inputs):
        folder = base.joinpath("once", name, *(str(value).replace("/", "-") for value in inputs))
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "result.pickle"
        with filelock.FileLock(folder / "lock"):
            if not kept.exists():
                kept.write_bytes(pickle.dumps(work(folder, *inputs)))
        return pickle.loads(kept.read_bytes())

    return result


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a libnvidia-ml.so.1 of our own, for LD_LIBRARY_PATH: the real pynvml then sees two GPUs."""
    if shutil.which("gcc") is None:
        pytest.skip("the fake driver library needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("support") / "fake_nvml.c"
    library = [
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(folder / "libnvidia-ml.so.1"),
    ]
    subprocess.run(["gcc", *library, str(source)], check=True, timeout=60)
    return str(folder)


@pytest.fixture(scope="session")
def nogpu_tool(once: Callable) -> None:
    once("nogpu", nogpu.set_up)


@pytest.fixture(autouse=True)
def _gpus_for_marked(request: pytest.FixtureRequest) -> None:
    """A test that carries the marker and forgets the fixture is not let onto a GPU unlocked."""
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("gpus")


def pytest_configure(config: pytest.Config) -> None:
    # a cache for this run: what a killed compile leaves in it spoils no other
    if not hasattr(config, "workerinput"):
        config.compile_cache = tempfile.mkdtemp(prefix="inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.compile_cache  # xdist's workers inherit it
    # a shell's "&" does that, and every script would inherit it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line(
            "markers", "timeout(seconds): without effect, pytest-timeout is not installed"
        )
    starts_workers = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if starts_workers and _asked_for_gpu_tests(config):
        with contextlib.suppress(NoGpus):  # the workers find and tell the same reason
            os.environ[SHARED] = ",".join(take_gpus(min(MOST_GPUS, len(visible_gpus()))))


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The decisive GPU tests come first: if the time is not enough for all, it is for them.

    Then what waits for a cluster or trains a real model: the last files of a run are quick ones.
    """

    def place(item: pytest.Item) -> int:
        if item.path.name == "test_gpu.py":
            return 0
        long = item.get_closest_marker("launch") or item.get_closest_marker("real_model")
        return 1 if long else 2

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    _selected[:] = [
        item.nodeid for item in session.items if item.get_closest_marker("gpu") is not None
    ]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "gpu" not in report.keywords:
        return
    if report.skipped:
        _skipped[report.nodeid] = (
            report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        )
    elif report.when == "call":
        _ran.append(report.nodeid)


def _asked_for_gpu_tests(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


def _nothing_ran(config: pytest.Config) -> bool:
    # under xdist only the workers collect: the reports tell that something was selected
    selected = _selected or _skipped
    return bool(
        _asked_for_gpu_tests(config) and selected and not _ran and not config.option.collectonly
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "compile_cache"):
        shutil.rmtree(config.compile_cache, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    gpu_host.close()
    release_gpus()
    if _nothing_ran(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = NOTHING_RAN


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """What ran on GPUs, what did not and why."""
    if not (_asked_for_gpu_tests(config) or _ran) or config.option.collectonly:
        return
    terminalreporter.section("GPU tests")
    terminalreporter.write_line(f"{len(_ran)} ran")
    for reason, count in Counter(_skipped.values()).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    if _nothing_ran(config):
        terminalreporter.write_line("NO GPU TEST RAN: this is not a pass.", red=True, bold=True)


@pytest.fixture(scope="session")
def smollm2(once) -> Path:
    """The real model's folder, made if it is not there; skips with pip's own words where that cannot be."""
    made = once(
        "smollm2", functools.partial(harness.run, "models/make_smollm2.py", timeout=900, warm=False)
    )
    if made.code == 2:
        pytest.skip(f"models/smollm2-135m: {made.err.strip()}")
    assert made.code == 0, made.err
    return harness.ROOT / "models/smollm2-135m"
