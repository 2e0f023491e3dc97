"""The four minimal.py: one program growing, one loss whatever cuts it, weights that load into the plain model.

Small: with three steps of other sizes, as of a reader who has edited them. In full: started as a reader starts it, by
python or by torchrun. Nothing here depends on time or on a machine.
"""

import ast
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from support.harness import (
    ROOT,
    Result,
    command,
    finish,
    in_full,
    in_long,
    run,
    start,
    with_prelude,
)

pytestmark = pytest.mark.timeout(1200)

AMP, DDP, FSDP, TENSOR = SCRIPTS = (
    "04_amp/minimal.py",
    "05_ddp/minimal.py",
    "06_fsdp_zero/minimal.py",
    "08_model_parallel/minimal.py",
)
FP32 = ("--dtype", "fp32")
SMALL_STEPS = 3
EDITED = {
    "STEPS = 20\n": f"STEPS = {SMALL_STEPS}\n",
    "GLOBAL_BATCH = 24 ": "GLOBAL_BATCH = 12 ",
    "LENGTH = 64 ": "LENGTH = 37 ",
}


def run_minimal(
    script: str | Path, folder: Path, *flags, nproc: int | None = None, warm: bool = True, **env
) -> Result:
    result = run(str(script), folder, *flags, nproc=nproc, warm=warm, **env)
    assert result.code == 0, f"exit code {result.code}\n{result.out[-2000:]}\n{result.err[-4000:]}"
    return result


def last_loss(result: Result, step: int = SMALL_STEPS) -> float:
    """The loss of the last step, which rank 0 alone prints, to six digits."""
    [loss] = re.findall(rf"step {step} \| loss (\d+\.\d{{6}})", result.out)
    return float(loss)


def saved_weights(result: Result) -> dict[str, torch.Tensor]:
    # weights_only: plain tensors, nothing of torch.distributed
    return torch.load(result.folder / "minimal.pt")


def small(script: str, folder: Path) -> Path:
    """Return a copy of the script whose reader has edited the sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / "minimal.py"
    copy.write_text((ROOT / script).read_text(encoding="utf-8"), encoding="utf-8")
    edit(copy, EDITED)
    return copy


def edit(copy: Path, edits: dict[str, str]) -> None:
    """Replace texts of a copy that must each stand there once."""
    source = copy.read_text(encoding="utf-8")
    for text, edited in edits.items():
        assert source.count(text) == 1, text
        source = source.replace(text, edited)
    copy.write_text(source, encoding="utf-8")


@pytest.fixture(scope="module")
def small_baseline(tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("small_baseline")
    return run_minimal(small(AMP, folder), folder, *FP32)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory) -> Result:
    return run_minimal(AMP, tmp_path_factory.mktemp("baseline"), *FP32, warm=False)


def same(result: Result, expected: Result, step: int) -> None:
    """One loss, and the same weights in fp32 under the same names."""
    assert last_loss(result, step) == pytest.approx(last_loss(expected, step), rel=1e-5)
    weights, expected_weights = saved_weights(result), saved_weights(expected)
    assert list(weights) == list(expected_weights)
    for name, weight in weights.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(
            weight,
            expected_weights[name],
            rtol=0,
            atol=1e-4,
            msg=lambda text, name=name: name + text,
        )


def test_they_import_torch_and_the_standard_library_only():
    for script in SCRIPTS:
        imported = set()
        for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        assert imported - sys.stdlib_module_names == {"torch"}, script


NOTES = {
    "\n\n# YOURS: the data. ": """

def note(*values):
    line = " ".join(map(str, ("note", os.environ["RANK"], *values)))
    print(line + "\\n", end="")  # in one piece, also among the lines of other ranks


# YOURS: the data. """,
    "text[start : start + LENGTH + 1]": "(note('row'), text[start : start + LENGTH + 1])[1]",
    "    logits = model(": "    note('draws', torch.rand(()).item())\n    logits = model(",
    "    dist.barrier()": "    note('end')\n    dist.barrier()",
}


def check_notes(result: Result, ranks: int, shares: int) -> None:
    """A rank makes its share of the rows, and draws other numbers than ranks with other rows."""
    rows = [0] * ranks
    draws = [[] for _ in range(ranks)]
    for rank, kind, *value in re.findall(r"note (\d) (\w+)(?: ([\d.e-]+))?", result.out):
        if kind == "row":
            rows[int(rank)] += 1
        elif kind == "draws":
            draws[int(rank)] += value
    assert rows == [SMALL_STEPS * 12 // shares] * ranks
    assert list(map(len, draws)) == [SMALL_STEPS] * ranks
    for rank in range(ranks):
        for other in range(rank):
            same_rows = rank * shares // ranks == other * shares // ranks
            assert (draws[rank] == draws[other]) == same_rows, (rank, other)
    assert len(set(itertools.chain(*draws))) == SMALL_STEPS * shares


OFTEN_CUT = [(DDP, 3), (FSDP, 2), (TENSOR, 4)]
CUT = [*OFTEN_CUT, in_full(FSDP, None), in_long(DDP, None), in_long(TENSOR, None)]


@pytest.mark.parametrize(("script", "nproc"), CUT)
def test_one_loss_and_the_same_weights(script, nproc, small_baseline, tmp_path):
    copy = small(script, tmp_path)
    edit(copy, NOTES)
    # a shell may have set it, and torchrun sets it anyway
    buffered = {"PYTHONUNBUFFERED": ""} if nproc is None else {}
    result = run_minimal(copy, tmp_path, *FP32, nproc=nproc, **buffered)
    same(result, small_baseline, SMALL_STEPS)
    if nproc is None:
        check_notes(result, ranks=1, shares=1)
        # Without torchrun, which starts python -u, lines wait in a buffer for the end.
        assert result.out.endswith("note 0 end\n")
    else:
        check_notes(result, ranks=nproc, shares=2 if script == TENSOR else nproc)


# Become one rank of a process group that sends nothing, then run the script as it stands.
# The second step is counted: the first one makes AdamW's state.
COUNT = """
import json
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mode = CommDebugMode()
counts = {"norm": None}
backward, step = torch.Tensor.backward, torch.optim.AdamW.step

def init_process_group(*args, **flags):
    pass

def take(part):
    names = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}
    names |= {"allreduce_": "all_reduce"}
    counts[part] = {}
    for operation, count in mode.comm_counts.items():
        name = str(operation).split(".")[-1]
        name = names.get(name, name)
        counts[part][name] = counts[part].get(name, 0) + count
    mode.comm_counts.clear()

def counted_backward(*args, **flags):
    take("forward")
    backward(*args, **flags)
    take("backward")

def counted_step(optimizer, *args, **flags):
    take("norm")
    if "counting" in counts:
        del counts["counting"]
        print(json.dumps(counts), flush=True)
        os._exit(0)
    step(optimizer, *args, **flags)
    counts["counting"] = True
    mode.__enter__()

dist.init_process_group = init_process_group
torch.Tensor.backward, torch.optim.AdamW.step = counted_backward, counted_step
"""
# FSDP gathers 4 blocks and the rest, and gathers the blocks again.
COLLECTIVES = {
    "forward": {"all_gather": 5},
    "backward": {"all_gather": 4, "reduce_scatter": 5},
    "norm": {"all_reduce": 1},
}
# Each block has two pairs of matrices. One mesh has one dimension to sum norms over, one has two.
ALL_REDUCES = {"forward": 4 * 2, "backward": 4 * 2, "norm": 3}


@pytest.mark.parametrize("script", [FSDP, TENSOR])
def test_the_collectives_of_a_step(script, tmp_path):
    result = run(with_prelude(script, tmp_path, COUNT), tmp_path, *FP32)
    assert result.code == 0, result
    counts = json.loads(result.out.splitlines()[-1])
    expected = COLLECTIVES
    if script == TENSOR:
        expected = {part: {**COLLECTIVES[part], "all_reduce": ALL_REDUCES[part]} for part in counts}
    assert counts == expected


@pytest.mark.full
@pytest.mark.parametrize(("script", "nproc"), OFTEN_CUT)
def test_one_loss_as_a_reader_starts_it(script, nproc, baseline, tmp_path):
    same(run_minimal(script, tmp_path, *FP32, nproc=nproc, warm=False), baseline, 20)


WITH_BUFFERS = {
    "\n\n# YOURS: the model. ": """

def table(tokens, channels):
    angles = torch.outer(torch.arange(tokens), 0.9 ** torch.arange(channels))
    return angles.cos()


# YOURS: the model. """,
    "        self.norm1 = nn.LayerNorm(width)\n": """
        self.norm1 = nn.LayerNorm(width)
        self.register_buffer("rotary", table(LENGTH, self.head_dim))
""",
    "        y = scaled_dot_product_attention(q, k,": """
        q = q * self.rotary
        k = k * self.rotary
        y = scaled_dot_product_attention(q, k,""",
}


@pytest.fixture(scope="module")
def baseline_with_buffers(tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("with_buffers")
    copy = small(AMP, folder)
    edit(copy, WITH_BUFFERS)
    return run_minimal(copy, folder, *FP32)


@pytest.mark.parametrize(("script", "nproc"), [(FSDP, None), in_full(TENSOR, 2)])
def test_a_copy_with_buffers_says_where_to_fill_them(
    script, nproc, baseline_with_buffers, tmp_path
):
    """to_empty leaves them undefined. The model that was filled trains and is saved as in 04."""
    copy = small(script, tmp_path)
    edit(copy, WITH_BUFFERS)
    result = run(str(copy), tmp_path, *FP32)
    assert result.code == 2
    *_, error = result.err.splitlines()
    assert "blocks.0.rotary" in error
    assert "step" not in result.out

    [line] = [line for line in copy.read_text().splitlines() if 'parser.error(f"buffer' in line]
    edit(copy, {line: "        buffer.copy_(table(*buffer.shape))"})
    filled = run_minimal(copy, tmp_path, *FP32, nproc=nproc)
    same(filled, baseline_with_buffers, SMALL_STEPS)
    assert "blocks.3.rotary" in saved_weights(filled)


def test_what_is_saved_is_the_plain_model(small_baseline):
    spec = importlib.util.spec_from_file_location("minimal", ROOT / AMP)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    minimal.LENGTH = 37  # as in the run
    model = minimal.Model()
    before = model.head.weight.detach().clone()
    model.load_state_dict(saved_weights(small_baseline))  # strict: all names, no others
    assert not torch.equal(model.head.weight, before)


@pytest.mark.parametrize(
    ("script", "nproc", "dtype"),
    [
        (AMP, None, None),
        (DDP, 2, "fp16"),
        in_full(AMP, None, "fp16"),
        in_full(FSDP, 2, "bf16"),
        in_full(TENSOR, 2, "bf16"),
    ],
)
def test_16_bits_end_near_fp32(script, nproc, dtype, small_baseline, tmp_path):
    flags = ["--dtype", dtype] if dtype else []  # without a flag: bf16
    result = run_minimal(small(script, tmp_path), tmp_path, *flags, nproc=nproc)
    loss, expected = last_loss(result), last_loss(small_baseline)
    assert loss == pytest.approx(expected, rel=0.02)
    assert loss != expected  # or the flag had no effect
    assert all(weight.dtype == torch.float32 for weight in saved_weights(result).values())


FIVE_RANKS = {"RANK": "0", "WORLD_SIZE": "5", "LOCAL_RANK": "0"}
REFUSED = [
    *((script, "", FIVE_RANKS, ("GLOBAL_BATCH=24", "5")) for script in (DDP, FSDP, TENSOR)),
    (AMP, "--dtype int8", {}, ("--dtype", "int8")),
    *((script, "--dtype fp16", {}, ("--dtype", "fp16")) for script in (FSDP, TENSOR)),
]


def test_what_cannot_run_ends_with_code_2(tmp_path):
    for script, flags, env, words in REFUSED:
        result = run(script, tmp_path, *flags.split(), **env)
        assert result.code == 2, result
        *_, error = result.err.splitlines()
        assert [word for word in words if word not in error] == [], result


@pytest.mark.full
def test_several_people_on_one_machine(small_baseline, tmp_path):
    """Without torchrun each run takes a port that is free."""
    folders = [tmp_path / "one", tmp_path / "other"]
    jobs = [start(command(str(small(DDP, folder)), *FP32), folder) for folder in folders]
    for job, folder in zip(jobs, folders, strict=True):
        result = finish(job, folder)
        assert result.code == 0, result.err
        assert last_loss(result) == pytest.approx(last_loss(small_baseline), rel=1e-5)
