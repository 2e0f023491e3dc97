"""Every lesson without flags, by itself and, where it has ranks, under torchrun with 1, 2 and 3 of them; on GPUs, those
whose own checks are the test."""

import pytest
from support.harness import ROOT, assert_refused, run

LESSONS = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("[0-9]*/[!_]*.py"))
RANKS = ("init_process_group(", "lesson.relaunch(")
WITH_RANKS = [
    script
    for script in LESSONS
    if any(call in (ROOT / script).read_text(encoding="utf-8") for call in RANKS)
]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "ranks"),
    [*((script, None) for script in LESSONS), *((s, n) for s in WITH_RANKS for n in (1, 2, 3))],
)
def test_it_runs_without_flags(tmp_path, script, ranks):
    result = run(script, tmp_path, nproc=ranks, timeout=900, warm=False, CUDA_VISIBLE_DEVICES="")
    if ranks is None or result.code == 0:
        assert result.code == 0, result
    else:
        assert_refused(result)  # ranks that do not divide what it cuts


ON_GPUS = {  # and the ranks, each with a GPU of its own
    "02_tensors_precision/tensors.py": [1],
    "05_ddp/ddp_from_scratch.py": [2],
    "06_fsdp_zero/zero_from_scratch.py": [2],
    "08_model_parallel/context_parallel.py": [1, 2],
    "08_model_parallel/expert_parallel.py": [1, 2],
    "08_model_parallel/pipeline_parallel.py": [2],
    "08_model_parallel/tensor_parallel.py": [1, 2],
    "09_inference/offloaded.py": [1],
    "09_inference/parity.py": [1],
    "09_inference/speculative.py": [1],
}


@pytest.mark.parametrize(
    ("script", "n"),
    [pytest.param(s, n, marks=pytest.mark.gpu(n=n)) for s in ON_GPUS for n in ON_GPUS[s]],
)
def test_its_checks_hold_on_gpus(gpu_run, tmp_path, script, n):
    nproc = n if script in WITH_RANKS else None
    result = gpu_run(script, tmp_path, "--device", "cuda", nproc=nproc)
    assert result.code == 0, result
