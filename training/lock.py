"""Lock a file for this process, on any file system, until the process ends.

Two locks are taken, because each fails where the other works:

    flock    The system releases it when the process dies, also by kill -9. Some file systems do not
             have it. On others it succeeds, but other machines do not see it.
    lease    A file FILE.lease with the name of its owner. Its owner touches it every few seconds.
             When it is not touched for LEASE_SECONDS, its owner is dead, and another process takes
             it. This works wherever a file can be created.
"""

import fcntl
import os
import time
from pathlib import Path

import filelock

from common.exits import StopSignalError, UserError, stop_signals
from common.runtime import ranks

SUFFIX = ".lease"
LEASE_SECONDS = 30
HEARTBEAT_SECONDS = 3
QUIET_SECONDS = 4  # wait so long before telling the user what the process waits for
POLL_SECONDS = 0.1


class InUseError(UserError):
    """A lock that a live process holds."""


class Lock:
    """A lock on a file, for one process at a time. It is released by release(), or by the exit.

    The lease of a process that was killed is taken at once on the same machine. Another machine
    waits LEASE_SECONDS for it. After release() nobody waits.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        # A missing flock must raise, because filelock would put another kind of lock in its place.
        self.flock = filelock.FileLock(file, fallback_to_soft=False)
        self.lease = filelock.SoftFileLease(
            file.with_name(file.name + SUFFIX),
            lease_duration=LEASE_SECONDS,
            heartbeat_interval=HEARTBEAT_SECONDS,
        )

    def acquire(self, seconds: float = float("inf")) -> None:
        """Wait for the lock. After some seconds, print a line that names the file.

        `seconds` is how long to wait for a process that is alive. Waiting for the lease of a dead
        process takes up to LEASE_SECONDS more.

        Raises:
            InUseError: A live process held the lock for so long.
            StopSignalError: The job was told to stop while this process waited.
            OSError: The file cannot be written.
        """
        wait = _Wait(self.file, seconds)
        try:
            self.flock.acquire(poll_interval=POLL_SECONDS, cancel_check=wait.is_over)
            flock_works = _excludes_others(self.file)
        except filelock.Timeout:
            raise wait.error() from None
        except OSError:
            flock_works = False  # no flock here; whether the folder can be written, the lease shows

        wait = _Wait(Path(self.lease.lock_file), seconds)
        owner = self.lease.owner
        if flock_works and owner is not None and _is_on_this_machine(owner):
            # This process has the flock. So the owner of the lease is dead.
            self.lease.force_break()
        try:
            self.lease.acquire(poll_interval=POLL_SECONDS, cancel_check=wait.is_over)
        except filelock.Timeout:
            self.flock.release()
            raise wait.error() from None

    def release(self) -> None:
        """Release the lock, if it is held."""
        self.lease.release()
        self.flock.release()

    def check(self) -> None:
        """Raise UserError if another process has taken the lock.

        It does so if this process was suspended, or the disk did not answer, for LEASE_SECONDS.
        """
        if self.lease.compromise is not None:
            raise UserError(
                f"{self.file}: another run has taken this lock, because this process did not "
                f"touch {self.lease.lock_file} for {LEASE_SECONDS} seconds"
            )

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_exception) -> None:
        self.release()


class _Wait:
    """Decide when the wait for a lock file is over, and tell the user about it."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file = file
        self.seconds = seconds
        self.start = time.monotonic()
        self.first_seen = _modified(file)
        self.announced = False

    def is_over(self) -> bool:
        """Return whether to give up. filelock calls this each time it finds the lock taken."""
        waited = time.monotonic() - self.start
        if waited > QUIET_SECONDS and not self.announced:
            self.announced = True
            # One line per node: its ranks wait for the same file.
            if ranks().local_rank == 0:
                print(f"waiting for {self.file}, locked by {self.owner()}", flush=True)
        if stop_signals:
            return True
        if waited < self.seconds:
            return False
        # An owner that touches its lease lives. One that does not may be dead: wait for that.
        is_lease = self.file.suffix == SUFFIX
        if is_lease and _modified(self.file) == self.first_seen:
            return waited > self.seconds + LEASE_SECONDS + HEARTBEAT_SECONDS
        return True

    def error(self) -> UserError:
        """Return the error to raise after the wait."""
        if stop_signals:
            return StopSignalError(f"signal {stop_signals[-1]} while waiting for {self.file}")
        return InUseError(f"{self.file} is locked by {self.owner()}")

    def owner(self) -> str:
        """Return who has locked the file, as well as it is known."""
        record = filelock.SoftFileLease(self.file).owner
        if record is None:
            return "another process"
        return f"process {record.pid} on {record.hostname}"


def _excludes_others(file: Path) -> bool:
    """Return whether a second flock on the file fails, as it must while the first is held."""
    with open(file, "rb") as second:
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _is_on_this_machine(owner) -> bool:
    """Return whether the running Linux kernel ran the owner of a lease, maybe in a container."""
    if owner.start is None:
        return False
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        return False
    # filelock writes this number in front of the start time of the process.
    return owner.start >> 64 == int(boot_id.strip().replace("-", ""), 16)


def _modified(file: Path) -> int | None:
    """Return when a file was modified, in nanoseconds, or None if it is missing."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
