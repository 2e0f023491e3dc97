"""The CUDA paths of every lesson, on GPUs that are not there: nogpu/README.md says what this can and cannot find.

make test-nogpu        the first call downloads 650 MB to ~/.cache/nogpu, or $NOGPU_HOME
pytest -m nogpu -k sample       two minutes of it
"""

import json
import re
from pathlib import Path

import pytest
from support import nogpu
from support.harness import ROOT, with_fault

from training import defaults

pytestmark = [pytest.mark.nogpu, pytest.mark.timeout(900), pytest.mark.usefixtures("nogpu_tool")]

# tiny.json, and the weights in folder/, have grouped heads, which nano has not
STEPS = "--steps 2 --global-batch-size 2 --seq-len 32 --log-every 1 --run-dir run"
TRAIN = f"{STEPS} --model tiny.json"
ANSWER = "--model folder --max-new-tokens 4"
ONE = {  # script: flags
    "01_devices/show.py": "",
    "02_tensors_precision/quantize.py": "--model folder",
    "02_tensors_precision/qat.py": "--model folder --steps 2 --seeds 1 --bits 2",
    "03_linear_regression/train.py": "--epochs 2 --batch-size 512 --lr 0.1 --run-dir run",
    "04_amp/train.py": TRAIN,
    "04_amp/compare.py": "--model tiny.json --steps 6 --batch-size 2 --seq-len 32",
    "06_fsdp_zero/convert_checkpoint.py": "",
    "07_memory_tricks/chunked_loss.py": "--tokens 128 --vocab-size 8192 --chunk-tokens 16 --hidden-size 64 --rounds 1",
    "07_memory_tricks/cuda_graphs.py": "--model tiny.json --seq-len 16 --micro-batch-sizes 1,2"
    " --rounds 1",
    "07_memory_tricks/gradient_checkpointing.py": "--rounds 1 --batch-size 2 --seq-len 64",
    "07_memory_tricks/lora.py": "--model tiny.json --steps 2 --batch-size 2 --seq-len 32",
    "07_memory_tricks/memory_profile.py": "--micro-batch-size 4",
    "07_memory_tricks/offload.py": "--rounds 1 --batch-size 2 --seq-len 32",
    "07_memory_tricks/optimizer_memory.py": "--model tiny.json --seq-len 32 --steps 2 --seeds 1",
    "07_memory_tricks/packing.py": "--model tiny.json --seq-len 96 --documents 9 --rounds 1",
    "09_inference/kv_cache.py": f"{ANSWER} --repeat 1",
    "09_inference/parity.py": "--model tiny.json --new-tokens 8 --steps 2 --no-compile",
    "09_inference/quantized.py": ANSWER,
    "09_inference/speculative.py": ANSWER,
    "09_inference/offloaded.py": ANSWER,
}
TWO = {  # under torchrun with two ranks
    "05_ddp/train.py": TRAIN,
    "05_ddp/collectives.py": "--max-bytes 65536 --samples 1",
    "05_ddp/ddp_from_scratch.py": "--model nano --seq-len 16 --steps 2",
    "06_fsdp_zero/train_fsdp.py": TRAIN,
    "06_fsdp_zero/train_zero.py": TRAIN,
    "06_fsdp_zero/finetune.py": "--model folder --seq-len 128 --steps 1 --global-batch-size 2 --run-dir run",
    "06_fsdp_zero/zero_from_scratch.py": "--model nano --seq-len 16 --steps 2",
    "06_fsdp_zero/compare.py": "--model nano --steps 1 --seq-len 32 --micro-batch-size 1",
    "06_fsdp_zero/muon.py": "--model nano --seq-len 32 --steps 2",
    "07_memory_tricks/gradient_accumulation.py": "--model tiny.json --rounds 1 --seq-len 32",
    "08_model_parallel/tensor_parallel.py": "--model nano --seq-len 16 --global-batch-size 4"
    " --micro-batch-size 2 --steps 2",
    "08_model_parallel/pipeline_parallel.py": (
        "--model untied-nano --seq-len 24 --steps 1 --micro-batch-size 1 --micro-batches-per-rank 2"
    ),
    "08_model_parallel/expert_parallel.py": "--model nano --seq-len 16 --steps 2",
    "08_model_parallel/context_parallel.py": "--model nano --steps 2 --seq-len 128 --batch-size 2",
    "08_model_parallel/train_3d.py": f"{TRAIN} --tp 2",
    "09_inference/infer_70b.py": ANSWER,
    "09_inference/offloaded.py": f"{ANSWER} --by zero3",
}
DATA_PARALLEL = {"05_ddp/data_parallel.py": "--model nano --seq-len 16"}  # one process, two GPUs
DEVICE_MAP = {"09_inference/offloaded.py": f"{ANSWER} --by device-map --memory 0.01"}
RANKS_AND_GPUS = [(ONE, 0, 1), (TWO, 2, 2), (DATA_PARALLEL, 0, 2), (DEVICE_MAP, 0, 1)]
# Lessons at the sizes that they have on a GPU without other flags.
AT_GPU_SIZES = [
    "01_devices/show.py",
    "01_devices/benchmark.py",
    "02_tensors_precision/tensors.py",
    "02_tensors_precision/precision.py",
    "02_tensors_precision/quantize.py",
    "02_tensors_precision/qat.py",
    "03_linear_regression/graphs.py",
    "07_memory_tricks/gradient_checkpointing.py",
    "07_memory_tricks/gradient_accumulation.py",
    "07_memory_tricks/chunked_loss.py",
    "07_memory_tricks/memory_profile.py",
    "07_memory_tricks/offload.py",
    "07_memory_tricks/optimizer_memory.py",
    "07_memory_tricks/lora.py",
    "07_memory_tricks/cuda_graphs.py",
    "09_inference/offloaded.py",
    "09_inference/speculative.py",
]
# Lessons without flags for their sizes: lines of the script, and smaller sizes.
SMALLER = {
    "02_tensors_precision/precision.py": {
        '"cuda": 4096': '"cuda": 256',
        '"cuda": 2**25': '"cuda": 65_536',
    },
    "02_tensors_precision/tensors.py": {
        '"cuda": 1024': '"cuda": 2',
        '"cuda": 8192': '"cuda": 64',
        '"cuda": 20': '"cuda": 1',
    },
}
# A number that the script computes with, and that kernels which do nothing leave undefined.
UNDEFINED = {"09_inference/speculative.py": ("int(is_accepted.long().cumprod(0).sum())", "1")}
MOST_BYTES = 8e9  # of GPU memory that these may take
NOT_HERE = {
    "07_memory_tricks/estimate.py": "computes, for a device by name",
    "09_inference/export.py": "its forms are for CPUs, or machine code that here would do nothing",
    "05_ddp/stragglers.py": "a collective of this NCCL waits where it is called, so no rank can be found to wait",
}
# Lessons with the defaults that they have on a GPU: flags that make the run shorter, ranks, GPUs.
# One rank, because the memory of a GPU is here that of the machine.
AT_GPU_DEFAULTS = {
    "04_amp/compare.py": ("", 0, 1),
    "05_ddp/collectives.py": ("--samples 1", 1, 1),
    "05_ddp/data_parallel.py": ("", 0, 2),
    "05_ddp/ddp_from_scratch.py": ("", 1, 1),
    "05_ddp/stragglers.py": ("", 1, 1),
    "06_fsdp_zero/compare.py": ("--steps 1", 1, 1),
    "06_fsdp_zero/muon.py": ("--steps 1", 1, 1),
    "06_fsdp_zero/zero_from_scratch.py": ("--steps 1", 1, 1),
    "08_model_parallel/tensor_parallel.py": ("", 1, 1),
    "08_model_parallel/pipeline_parallel.py": ("", 1, 1),
    "08_model_parallel/context_parallel.py": ("", 1, 1),
    "09_inference/kv_cache.py": ("--max-new-tokens 4", 0, 1),
    "09_inference/parity.py": ("--steps 2 --no-compile", 0, 1),
}
SAMPLE = ("04_amp/train.py", "06_fsdp_zero/train_fsdp.py", "09_inference/kv_cache.py")
GPU_TESTS = {  # of pytest -m gpu
    "test_gpu.py::test_more_processes_than_gpus_is_one_line": "values",
    "test_01_doctor.py": "values",
    "test_07_offload.py::test_a_gpu_is_not_waited_for": "values",
    "test_08_train_3d.py": "values",
    "test_09_gpu.py": "values",
    "test_faults.py": "values",
    "test_model.py": "values",
    "test_planner.py::test_the_peak_is_what_a_gpu_allocates[nano-04_amp/train.py]": "noop",
    "test_planner.py::test_the_peak_is_what_a_gpu_allocates[nano-06_fsdp_zero/train_fsdp.py]": "noop",
}
# Left out: of test_gpu.py what compares sixteen runs of nano, too slow in values mode; test_bare.py and those of 02 to
# 07, which run lessons of the tables above at larger sizes; those of benchmark, stragglers and debug_hang, which time.
TRAINING = {  # and ranks
    "04_amp/train.py": 0,
    "05_ddp/train.py": 2,
    "06_fsdp_zero/train_fsdp.py": 2,
    "08_model_parallel/train_3d.py": 2,
}


@pytest.mark.parametrize("tests", GPU_TESTS)
def test_gpu_tests_that_need_no_speed(tmp_path, tests):
    """First, as they take longest."""
    result = nogpu.gpu_tests(GPU_TESTS[tests], tmp_path, tests)
    assert result.code == 0, result
    assert "skipped" not in result.out, result


def test_every_lesson_with_a_device_is_listed():
    lessons = {
        str(file.relative_to(ROOT))
        for file in ROOT.glob("[0-9]*/[!_]*.py")
        if "args.device" in file.read_text(encoding="utf-8")
    }
    assert lessons - {*ONE, *TWO, *DATA_PARALLEL, *AT_GPU_SIZES, *NOT_HERE} == set()


def named(script: str) -> str:
    return f"sample-{script}" if script in SAMPLE else script


@pytest.mark.parametrize(
    ("script", "flags", "ranks", "gpus"),
    [
        pytest.param(script, flags, ranks, gpus, id=named(script))
        for table, ranks, gpus in RANKS_AND_GPUS
        for script, flags in table.items()
    ],
)
def test_values_are_right(tmp_path, script, flags, ranks, gpus):
    """Each script's own checks are the test."""
    result = nogpu.run("values", tmp_path, script, f"{flags} --device cuda", ranks, gpus)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result


@pytest.mark.parametrize("script", SMALLER)
def test_values_are_right_at_smaller_sizes(tmp_path, script):
    (line, smaller), *others = SMALLER[script].items()
    file = with_fault(script, tmp_path, line, smaller)
    for line, smaller in others:
        text = file.read_text(encoding="utf-8")
        assert text.count(line) == 1
        file.write_text(text.replace(line, smaller), encoding="utf-8")
    result = nogpu.run("values", tmp_path, str(file), "--device cuda")
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result


MINIMAL = {"04_amp": 0, "05_ddp": 2, "06_fsdp_zero": 2, "08_model_parallel": 4}  # and ranks
SMALLER_MINIMAL = {
    "STEPS = 20\n": "STEPS = 2\n",
    "GLOBAL_BATCH = 24 ": "GLOBAL_BATCH = 4 ",
    "def main():": "import atexit\natexit.register(print, 'the end')\n\n\ndef main():",
}


def test_the_minimal_scripts_have_one_loss_and_end_as_python_ends(tmp_path):
    """With NCCL nothing skips atexit. AdamW updates lists of DTensors, on two meshes in 08."""
    losses = []
    for folder, ranks in MINIMAL.items():
        source = (ROOT / folder / "minimal.py").read_text(encoding="utf-8")
        for text, smaller in SMALLER_MINIMAL.items():
            assert source.count(text) == 1, text
            source = source.replace(text, smaller)
        copy = tmp_path / f"{folder}.py"
        copy.write_text(source, encoding="utf-8")
        result = nogpu.run("values", tmp_path, str(copy), "--dtype fp32", ranks)
        assert result.code == 0, result
        assert result.out.count("the end") == max(ranks, 1), result
        [line] = [line for line in result.out.splitlines() if line.startswith("step 2 ")]
        losses.append(float(line.split()[-1]))
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-5)


SMALLER_GRPO = {
    '"cuda": 512}': '"cuda": 64}',
    '"cuda": 4}': '"cuda": 2}',
    '"cuda": 256}': '"cuda": 4}',
    "\nSTEPS = 60\n": "\nSTEPS = 2\n",
    "SFT_STEPS = 250\n": "SFT_STEPS = 2\n",
    "        assert after > 0.9": "        assert after < 0.9",
}


@pytest.mark.parametrize("script", ["grpo", "distill"])
def test_two_ranks_learn_from_their_own_samples(tmp_path, script):
    """Whose check holds: trainer and server agree."""
    source = (ROOT / f"10_post_training/{script}.py").read_text(encoding="utf-8")
    for text, smaller in SMALLER_GRPO.items():
        assert source.count(text) == 1, text
        source = source.replace(text, smaller)
    copy = tmp_path / f"{script}.py"
    copy.write_text(source, encoding="utf-8")
    result = nogpu.run("values", tmp_path, str(copy), "--minibatches 2 --json s.json", 2)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["peak_memory_bytes"] > 0


def test_learning_from_samples_at_the_size_of_a_gpu(tmp_path):
    """Two steps, without the checks of numbers, which kernels that do nothing cannot pass."""
    source = (ROOT / "10_post_training/grpo.py").read_text(encoding="utf-8")
    copy = tmp_path / "grpo.py"
    shorter = source.replace("STEPS = 60\n", "STEPS = 2\n")
    shorter = shorter.replace("SFT_STEPS = 250\n", "SFT_STEPS = 2\n")
    # Nothing is counted here.
    copy.write_text(shorter.replace(" / answer_tokens,", ","), encoding="utf-8")
    flags = f"{copy} --minibatches 4 --json s.json"
    result = nogpu.run("noop", tmp_path, "tests/support/without_checks.py", flags)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert len(summary["history"]) == 2
    assert 0 < summary["peak_memory_bytes"] <= MOST_BYTES


RESUMABLE = ["05_ddp/resumable.py", "06_fsdp_zero/resumable.py"]
RUN = "--run-dir run --steps 3 --global-batch 4 --micro-batch 1 --save-every 2 --log-every 1"


def test_a_run_continues_on_gpus_with_the_other_script(tmp_path):
    """Collectives of two process groups, fused AdamW, and checkpoints of tensors on a GPU."""
    last_loss = r"step 3 \| loss ([\d.]+)"
    flags = f"{RUN} --dtype fp32"
    whole = nogpu.run("values", tmp_path / "whole", RESUMABLE[1], flags, 2)
    assert whole.code == 0, whole
    source = (ROOT / RESUMABLE[0]).read_text(encoding="utf-8")
    line = "        micro_batches = load_batch(train, step)\n"
    assert source.count(line) == 1
    killing = f"        step == 3 and os.kill(os.getpid(), signal.SIGKILL)\n{line}"
    copy = tmp_path / "killed.py"
    copy.write_text(source.replace(line, killing), encoding="utf-8")
    assert nogpu.run("values", tmp_path, str(copy), flags, 2).code != 0
    resumed = nogpu.run("values", tmp_path, RESUMABLE[1], flags, 2)
    assert resumed.code == 0, resumed
    assert "2 of 3 steps are done" in resumed.out
    losses = [float(re.search(last_loss, result.out)[1]) for result in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("script", RESUMABLE)
def test_resumable_compiles(tmp_path, script):
    result = nogpu.run("noop", tmp_path, script, RUN, 2)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result


@pytest.mark.parametrize("script", AT_GPU_SIZES)
def test_sizes_of_a_gpu_run_to_the_end_and_fit(tmp_path, script):
    """Without the checks of numbers, which kernels that do nothing cannot pass."""
    file = ROOT / script
    if script in UNDEFINED:
        file = with_fault(script, tmp_path, *UNDEFINED[script])
    flags = f"{file} --device cuda --json s.json"
    result = nogpu.run("noop", tmp_path, "tests/support/without_checks.py", flags)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert (summary.get("peak_memory_bytes") or 0) <= MOST_BYTES


@pytest.mark.parametrize("script", TRAINING)
def test_it_compiles(tmp_path, script):
    result = nogpu.run(
        "noop", tmp_path, script, f"{TRAIN} --device cuda --compile", TRAINING[script]
    )
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result


TRAIN_3D = "08_model_parallel/train_3d.py"


def train_3d_unchecked(folder: Path, flags: str) -> dict:
    """Return the summary of two ranks, without the checks of numbers."""
    words = f"{ROOT / TRAIN_3D} {flags} --device cuda --json s.json"
    result = nogpu.run("noop", folder, "tests/support/without_checks.py", words, ranks=2)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "flags", ["--tp 2 --dtype bf16", "--cp 2 --dtype bf16", "--cp 2 --dtype fp32"]
)
def test_tensor_and_context_ranks_compile(tmp_path, flags):
    train_3d_unchecked(tmp_path, f"{TRAIN} --compile {flags}")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_context_ranks_hold_neither_scores_nor_a_mask(tmp_path, dtype):
    """The scores of one layer's last chunk would be 256 or 512 MiB, a mask 64 or 128."""
    nogpu.write_shape(tmp_path, "long.json", num_attention_heads=8, max_position_embeddings=8192)
    flags = f"--model long.json --seq-len 8192 --global-batch-size 1 --steps 1 --dtype {dtype}"
    summary = train_3d_unchecked(tmp_path, f"{flags} --cp 2 --run-dir run")
    assert summary["peak_memory_bytes"] < 128 * 2**20


@pytest.mark.parametrize("script", AT_GPU_DEFAULTS)
def test_the_defaults_on_a_gpu_run_to_the_end_and_fit(tmp_path, script):
    """Without the checks of numbers, which kernels that do nothing cannot pass."""
    flags, ranks, gpus = AT_GPU_DEFAULTS[script]
    words = f"{ROOT / script} {flags} --device cuda --json s.json"
    result = nogpu.run("noop", tmp_path, "tests/support/without_checks.py", words, ranks, gpus)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["peak_memory_bytes"] <= 8e9


def test_deepspeed_trains_the_defaults_of_a_gpu(tmp_path):
    """At stage 3, whose numbers stay finite although kernels do nothing."""
    flags = "--stage 3 --steps 1 --micro-batch-size 2 --device cuda --run-dir run"
    result = nogpu.run("noop", tmp_path, "06_fsdp_zero/train_zero.py", flags, ranks=1)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result
    trained = json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["flags"]
    for name in ("model", "global_batch_size", "compile"):
        assert trained[name] == getattr(defaults.ON_GPU, name), name


@pytest.mark.parametrize(
    ("cudnn", "result", "kernel"),
    [("91900", "ok", "CUDNN_ATTENTION"), ("91002", "warn", "FLASH_ATTENTION")],
)
def test_doctor_warns_of_a_cudnn_that_is_too_old_for_its_attention(tmp_path, cudnn, result, kernel):
    flags = "--json doctor.json"
    nogpu.run("values", tmp_path, "01_devices/doctor.py", flags, NOGPU_CUDNN=cudnn)
    checks = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))["checks"]
    attention = [check for check in checks if check["check"] == "attention"]
    assert [check["result"] for check in attention] == [result]
    assert kernel in attention[0]["seen"]


def test_more_blocks_than_dynamo_compiles_anew(tmp_path):
    """Each block is compiled by itself, for forward and for recomputing; Dynamo gives up after eight versions."""
    nogpu.write_shape(tmp_path, "ten.json", num_hidden_layers=10)
    flags = f"{STEPS} --model ten.json --device cuda --compile --checkpointing selective"
    result = nogpu.run("noop", tmp_path, "06_fsdp_zero/train_fsdp.py", flags, ranks=2)
    assert result.code == 0, result
    assert "nogpu: " not in result.err, result


def test_grouped_heads_in_fp32_hold_no_scores(tmp_path):
    """Two layers of llama-1b at 4,096 tokens: the scores of one layer alone would be 2 GiB."""
    shape = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    nogpu.write_shape(tmp_path, "two.json", **shape, max_position_embeddings=4096)
    flags = "--model two.json --seq-len 4096 --global-batch-size 1 --steps 1 --dtype fp32 --run-dir run --json s.json"
    result = nogpu.run("noop", tmp_path, "04_amp/train.py", f"{flags} --device cuda")
    assert result.code == 0, result
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    of_parameters = 16 * summary["parameters"]  # weights, gradients and two moments
    assert of_parameters < summary["peak_memory_bytes"] < of_parameters + 2**30


COMPARED = {  # script: flags, ranks, and whether it runs transformers' model
    "07_memory_tricks/lora.py": (ONE["07_memory_tricks/lora.py"], 0, False),
    "09_inference/kv_cache.py": (f"{ANSWER} --repeat 1", 0, True),
    "09_inference/quantized.py": (f"{ANSWER} --weights fp32", 0, True),
    "09_inference/speculative.py": (ANSWER, 0, True),
    "09_inference/offloaded.py": (ONE["09_inference/offloaded.py"], 0, True),
    "09_inference/infer_70b.py": (ANSWER, 2, True),
    "06_fsdp_zero/finetune.py": (TWO["06_fsdp_zero/finetune.py"], 2, True),
}
MATMULS = {
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_dot_product_flash_attention_for_cpu",
}


@pytest.mark.parametrize("script", COMPARED)
def test_a_comparison_computes_on_the_gpu(tmp_path, script):
    """Neither transformers' model nor any matmul is on the CPU where the script has a GPU."""
    flags, ranks, has_transformers = COMPARED[script]
    words = f"report.json {ROOT / script} {flags} --device cuda"
    result = nogpu.run("values", tmp_path, "tests/support/cpu_operators.py", words, ranks)
    assert result.code == 0, result
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert bool(report["transformers"]) == has_transformers
    assert all(devices == ["cuda"] for devices in report["transformers"])
    assert not MATMULS & set(report["operators"])


def test_a_reference_that_does_not_fit_on_the_gpu_computes_on_the_cpu(tmp_path):
    """The stub GPU has 79 GiB. Precision is restored, and the peak does not count the comparison."""
    driver = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from lm import reference
device = torch.device("cuda", 0)
torch.set_float32_matmul_precision("high")
with reference.comparison(device, needed_bytes=2**20) as where:
    assert where == device
    assert torch.get_float32_matmul_precision() == "highest"
    torch.empty(2**30, dtype=torch.uint8, device=where)
assert torch.get_float32_matmul_precision() == "high"
assert torch.cuda.max_memory_allocated() < 2**20
with reference.comparison(device, needed_bytes=80 * 2**30) as where:
    assert where.type == "cpu"
"""
    (tmp_path / "driver.py").write_text(driver, encoding="utf-8")
    result = nogpu.run("noop", tmp_path, str(tmp_path / "driver.py"), str(ROOT))
    assert result.code == 0, result


BETWEEN_LOG_LINES = f"{TRAIN} --log-every 100 --dtype bf16"
EXPERTS = f"{STEPS} --log-every 100 --dtype bf16 --model nano-moe --ep 2"
SLOW = "values"  # in noop mode ranks meet numbers that they refuse
COUNTED = {  # words of the command, ranks, mode, steps, and how often a step may wait for what
    "one": (f"04_amp/train.py {BETWEEN_LOG_LINES}", 0, "noop", 4, {}),
    # torch's DDP times its first ten steps and each 100th, and then waits for its own events
    "ddp": (f"05_ddp/train.py {BETWEEN_LOG_LINES}", 2, "noop", 11, {}),
    "fsdp": (f"06_fsdp_zero/train_fsdp.py {BETWEEN_LOG_LINES}", 2, "noop", 4, {}),
    "recomputed": (
        f"06_fsdp_zero/train_fsdp.py {BETWEEN_LOG_LINES} --checkpointing full",
        2,
        "noop",
        4,
        {},
    ),
    "3d-tensor": (f"08_model_parallel/train_3d.py {BETWEEN_LOG_LINES} --tp 2", 2, SLOW, 2, {}),
    # A layer with experts waits once, in forward, for the sizes of its exchange.
    "3d-experts": (
        f"08_model_parallel/train_3d.py {EXPERTS} --checkpointing selective",
        2,
        SLOW,
        2,
        {"copy async to host": 4, "sync stream": 4},
    ),
    "3d-stages": (
        f"08_model_parallel/train_3d.py {BETWEEN_LOG_LINES} --micro-batch-size 1 --pp 2",
        2,
        SLOW,
        2,
        {},
    ),
}


def waits(folder: Path, words: str, ranks: int, how: str) -> list[dict[str, int]]:
    """What each rank has waited for, and how often it has asked the driver for memory."""
    kinds = ("sync", "copy to host", "copy async to host", "memory cudaMalloc")
    script, flags = words.split(maxsplit=1)
    counted = nogpu.counts(folder, script, f"{flags} --device cuda", ranks, how)
    return [
        {what: n for what, n in of_rank.items() if what.startswith(kinds)} for of_rank in counted
    ]


@pytest.mark.parametrize("case", COUNTED)
def test_a_step_waits_for_nothing_else(tmp_path, case):
    """Between two log lines: a run of twice as many steps waits as often, and so the GPU never stands still."""
    words, ranks, how, steps, due = COUNTED[case]
    few, many = (
        waits(tmp_path / str(n), f"{words} --steps {n}", ranks, how) for n in (steps, 2 * steps)
    )
    assert len(few) == len(many) == max(1, ranks)
    for before, after in zip(few, many, strict=True):
        assert {
            what: (after[what] - before.get(what, 0)) / steps
            for what in after
            if after[what] != before.get(what)
        } == due


def test_decode_waits_once_in_eight_tokens(tmp_path):
    """The CPU reads tokens so that it can print them; were it each one, the GPU would wait for Python at each step."""
    command = "09_inference/infer_70b.py --model tiny.json --dtype bf16 --max-new-tokens"
    (few,), (many,) = (waits(tmp_path / str(n), f"{command} {n}", 0, "noop") for n in (9, 25))
    assert {what: n - few.get(what, 0) for what, n in many.items() if n != few.get(what)} == {
        "sync stream": 2,
        "copy async to host": 2,
    }
