"""What a launcher or the environment gets wrong is one line, exit code 2."""

import json
import subprocess
import sys

import pytest
from support.harness import (
    BASELINE,
    LIMIT,
    ROOT,
    SEVERAL,
    TEXT,
    Result,
    assert_refused,
    clean_env,
    error_lines,
    run,
    train,
)

DDP = SEVERAL[0]
FSDP = "06_fsdp_zero/train_fsdp.py"
FINETUNE = "06_fsdp_zero/finetune.py"
COLLECTIVES = "05_ddp/collectives.py"
TENSOR_PARALLEL = "08_model_parallel/tensor_parallel.py"
SHOW = "01_devices/show.py"
DOCTOR = "01_devices/doctor.py"
ESTIMATE = "07_memory_tricks/estimate.py"

RANK_0_OF_2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


# --- python -O, which leaves out the assertions that check results


@pytest.mark.parametrize(("flag", "script"), [("-O", BASELINE), ("-OO", ESTIMATE)])
def test_python_without_assertions_is_refused(tmp_path, flag, script):
    argv = [sys.executable, flag, str(ROOT / script)]
    process = subprocess.run(
        argv, cwd=tmp_path, env=clean_env(), capture_output=True, text=True, timeout=LIMIT
    )
    result = Result(process.returncode, process.stdout, process.stderr, tmp_path)
    assert_refused(result, "-O", "PYTHONOPTIMIZE")
    assert result.out == ""
    assert not list(tmp_path.iterdir())


def test_the_variable_that_leaves_out_assertions_is_refused(tmp_path):
    for value in ("2", "x"):
        result = run(ESTIMATE, tmp_path, PYTHONOPTIMIZE=value)
        assert_refused(result, "-O", "PYTHONOPTIMIZE")
        assert result.out == ""


@pytest.mark.launch
def test_the_variable_is_named_once_under_torchrun(tmp_path):
    result = run(DDP, tmp_path, "--device", "cpu", nproc=2, PYTHONOPTIMIZE="1")
    [line] = error_lines(result)  # beside the traceback of torchrun itself
    assert "error: python -O" in line
    assert (result.code, result.out) == (1, ""), result
    assert "exitcode  : 2" in result.err


# --- srun and mpirun start processes without RANK

LONE_TASKS = {
    "srun": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
    "srun, an old Slurm": {"SLURM_STEP_ID": "3", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    "mpirun of Open MPI": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    "mpirun of MPICH": {"PMI_SIZE": "2", "PMI_RANK": "0"},
}
ONE_PROCESS = {
    "the shell of a batch job": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    "a step of one task": {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "0",
    },
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
    "independent runs": {
        **LONE_TASKS["srun"],
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    },
}


def test_tasks_that_would_train_alone_are_refused(tmp_path):
    cases = [(launcher, DDP) for launcher in LONE_TASKS]
    cases += [("srun", script) for script in (BASELINE, FSDP, FINETUNE, COLLECTIVES)]
    for launcher, script in cases:
        result = run(script, tmp_path, "--device", "cpu", **LONE_TASKS[launcher])
        assert_refused(result, launcher.split()[0].rstrip(","), "torchrun --nproc_per_node")
        assert result.out == ""


def test_only_the_first_task_tells_it(tmp_path):
    other = LONE_TASKS["srun"] | {"SLURM_PROCID": "1"}
    result = run(DDP, tmp_path, "--device", "cpu", **other)
    assert (result.code, result.out, result.err) == (2, "", "")


def test_one_process_of_a_job_trains(tmp_path):
    for case, variables in ONE_PROCESS.items():
        result = train(DDP, tmp_path / case, "--steps", 1, "--keep", 0, **variables)
        assert result.summary["steps"] == 1


def test_torchrun_in_a_task_trains(tmp_path):
    train(DDP, tmp_path, "--steps", 1, nproc=2, **LONE_TASKS["srun"])


def test_a_script_of_one_process_may_run_in_each_task(tmp_path):
    for script in (SHOW, ESTIMATE):
        assert run(script, tmp_path, **LONE_TASKS["srun"]).code == 0


@pytest.mark.full
def test_doctor_in_each_task_examines_a_training_script(tmp_path):
    own_flags = ("--json", "doctor.json", "--script", ROOT / BASELINE)
    flags = ("--device", "cpu", "--data", TEXT, "--steps", 1)
    result = run(DOCTOR, tmp_path, *own_flags, "--", *flags, **LONE_TASKS["srun"])
    checks = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))["checks"]
    results = {check["check"]: check["result"] for check in checks}
    assert (results["script"], results["gloo all-reduce"]) == ("ok", "ok"), result


# --- RANK without its companions, and variables that must be numbers

WRONG_VARIABLES = {  # variables, and the words of the line
    "no address": (DDP, RANK_0_OF_2, "MASTER_ADDR ''"),
    "no address, a lesson": (COLLECTIVES, RANK_0_OF_2, "MASTER_ADDR ''"),
    "no port": (FSDP, {**RANK_0_OF_2, "MASTER_ADDR": "localhost"}, "MASTER_PORT ''"),
    "a port that is no number": (
        DDP,
        {**RANK_0_OF_2, **ADDRESS, "MASTER_PORT": "http"},
        "MASTER_PORT 'http'",
    ),
    "a port that is none": (
        DDP,
        {**RANK_0_OF_2, **ADDRESS, "MASTER_PORT": "70000"},
        "MASTER_PORT '70000'",
    ),
    "rank of another job": (DDP, {**RANK_0_OF_2, **ADDRESS, "RANK": "2"}, "RANK '2' WORLD_SIZE"),
    "counted from 1": (DDP, {**RANK_0_OF_2, **ADDRESS, "LOCAL_RANK": "1"}, "LOCAL_RANK '1'"),
    "no ranks": (FSDP, {**RANK_0_OF_2, **ADDRESS, "WORLD_SIZE": "0"}, "WORLD_SIZE '0'"),
    "a size alone": (TENSOR_PARALLEL, {"WORLD_SIZE": "4"}, "WORLD_SIZE torchrun"),
    "a size that is no number": (TENSOR_PARALLEL, {"WORLD_SIZE": "four"}, "WORLD_SIZE 'four'"),
    "a size of prepare_data": ("05_ddp/prepare_data.py", {"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'"),
    "minutes": (DDP, {"COLLECTIVE_TIMEOUT_SECONDS": "10m"}, "COLLECTIVE_TIMEOUT_SECONDS '10m'"),
    "no time": (FSDP, {"COLLECTIVE_TIMEOUT_SECONDS": "0"}, "COLLECTIVE_TIMEOUT_SECONDS '0'"),
    "less": (DDP, {"COLLECTIVE_TIMEOUT_SECONDS": "-600"}, "COLLECTIVE_TIMEOUT_SECONDS '-600'"),
    "part of a second": (
        FINETUNE,
        {"COLLECTIVE_TIMEOUT_SECONDS": "0.5"},
        "COLLECTIVE_TIMEOUT_SECONDS '0.5'",
    ),
    "before relaunch": (
        COLLECTIVES,
        {"COLLECTIVE_TIMEOUT_SECONDS": "1e3"},
        "COLLECTIVE_TIMEOUT_SECONDS '1e3'",
    ),
    "lock": (BASELINE, {"RUN_DIR_LOCK_SECONDS": "2min"}, "RUN_DIR_LOCK_SECONDS '2min'"),
    "lock forever": (FSDP, {"RUN_DIR_LOCK_SECONDS": "-1"}, "RUN_DIR_LOCK_SECONDS '-1'"),
}


def test_a_variable_that_cannot_be_used_is_named(tmp_path):
    for script, variables, words in WRONG_VARIABLES.values():
        result = run(script, tmp_path, **variables)
        assert_refused(result, *words.split())
        assert result.out == ""
        assert not (tmp_path / "runs").exists()


def test_a_variable_is_named_once_under_torchrun(tmp_path):
    name = "COLLECTIVE_TIMEOUT_SECONDS"
    result = run(DDP, tmp_path, "--device", "cpu", nproc=2, **{name: "ten"})
    assert_refused(result, name, "'ten'")


def test_empty_variables_are_as_if_not_set(tmp_path):
    empty = dict.fromkeys(["COLLECTIVE_TIMEOUT_SECONDS", "RUN_DIR_LOCK_SECONDS", "RANK"], "")
    assert train(DDP, tmp_path, "--steps", 1, **empty).summary["steps"] == 1
