"""Lock a file for one process, on any file system.

The lock is a lease: a file with the name of its owner, who touches it every few seconds. If it is
not touched for LEASE_SECONDS, its owner is dead, and another process takes it. The lease of a
process that was killed on the same machine is taken at once. This works wherever a file can be
created. flock, which some file systems do not have, is not needed.
"""

import time
from pathlib import Path

import filelock

from common.exits import StopSignalError, UserError, stop_signals
from common.runtime import ranks

LEASE_SECONDS = 30
HEARTBEAT_SECONDS = 3
QUIET_SECONDS = 4  # wait so long before telling the user what the process waits for
POLL_SECONDS = 0.1


class InUseError(UserError):
    """A lock that a live process holds."""


class Lock:
    """A lock file, for one process at a time. It is deleted by release(), or by the exit."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lease = filelock.SoftFileLease(
            file, lease_duration=LEASE_SECONDS, heartbeat_interval=HEARTBEAT_SECONDS
        )

    def acquire(self, seconds: float = float("inf")) -> None:
        """Wait for the lock. After some seconds, print a line that names the file and its owner.

        `seconds` is how long to wait for a process that is alive. Waiting for the lease of a dead
        process takes up to LEASE_SECONDS more.

        Raises:
            InUseError: A live process held the lock for so long.
            StopSignalError: The job was told to stop while this process waited.
            OSError: The file cannot be written.
        """
        start = time.monotonic()
        touched_at_start = self._touched()
        announced = False

        def is_over() -> bool:
            """Return whether to give up. filelock calls this each time it finds the lock taken."""
            nonlocal announced
            waited = time.monotonic() - start
            # One line per node: its ranks wait for the same file.
            if waited > QUIET_SECONDS and not announced and ranks().local_rank == 0:
                announced = True
                print(f"waiting for {self.file}, locked by {self._owner()}", flush=True)
            is_dead = self._touched() == touched_at_start  # as far as this process knows
            limit = seconds + LEASE_SECONDS + HEARTBEAT_SECONDS if is_dead else seconds
            return bool(stop_signals) or waited > limit

        try:
            self.lease.acquire(poll_interval=POLL_SECONDS, cancel_check=is_over)
        except filelock.Timeout:
            if stop_signals:
                message = f"signal {stop_signals[-1]} while waiting for {self.file}"
                raise StopSignalError(message) from None
            raise InUseError(f"{self.file} is locked by {self._owner()}") from None

    def release(self) -> None:
        """Release the lock, if it is held."""
        self.lease.release()

    def check(self) -> None:
        """Raise UserError if another process has taken the lock.

        This happens if this process did not touch the file for LEASE_SECONDS: it was suspended, or
        the disk did not answer.
        """
        owner = self.lease.owner  # as the file says now
        is_other = owner is not None and owner.token != self.lease.token
        if self.lease.compromise is not None or is_other:
            raise UserError(
                f"{self.file}: another run has taken this lock, because this process did not "
                f"touch it for {LEASE_SECONDS} seconds"
            )

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_exception) -> None:
        self.release()

    def _owner(self) -> str:
        """Return who has the lock, as well as it is known."""
        record = self.lease.owner
        if record is None:
            return "another process"
        return f"process {record.pid} on {record.hostname}"

    def _touched(self) -> int | None:
        """Return when the file was touched last, in nanoseconds, or None if it is missing."""
        try:
            return self.file.stat().st_mtime_ns
        except OSError:
            return None
