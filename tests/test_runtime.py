"""common/runtime.py: what picking a device changes in the process. Ranks and groups are in test_05_ddp.py."""

import ctypes
import resource

import pytest
import torch

from common import runtime


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_a_cpu_keeps_freed_memory_for_the_next_step():
    """Left alone, glibc gives these 64 MiB back each time, and Linux faults 16,384 pages in again."""

    def page_faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        activations = [torch.ones(2**20) for _ in range(16)]  # 4 MiB each
        del activations
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    runtime.pick_device("cpu")
    faults = [page_faults_of_a_step() for _ in range(5)]
    assert min(faults) < 1000, faults
