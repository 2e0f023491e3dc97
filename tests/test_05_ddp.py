"""05_ddp/train.py: what several ranks compute, check and tell."""

from types import SimpleNamespace

import pytest
import torch
from support.checkpoints import saved
from support.harness import ROOT, run, train, with_prelude

from lm import data
from lm.weights import build, load_config
from training.batches import Batches

SCRIPT = "05_ddp/train.py"


def test_the_logged_loss_is_the_mean_over_ranks_and_micro_batches(tmp_path):
    """Recompute it by hand, sequence by sequence, in float64, for the first step and one in the middle."""
    result = train(
        SCRIPT,
        tmp_path,
        "--data",
        "stdlib",
        "--micro-batch-size",
        2,
        "--save-every",
        7,
        "--seed",
        3,
        nproc=2,
    )
    net = build("nano", load_config(str(tmp_path / "tiny.json"), 256, 32), seed=3)
    sizes = SimpleNamespace(seq_len=32, global_batch_size=12, micro_batch_size=None, seed=3)
    samples = data.sequences(data.load_corpus("stdlib", "bytes"), sizes.seq_len)
    batches = Batches(*samples, sizes, rank=0, world_size=1)
    for step, weights in ((1, net.state_dict()), (8, saved(tmp_path, 7)["model"])):
        net.load_state_dict(weights)
        inputs, targets = next(batches.stream(step - 1))
        with torch.no_grad():
            losses = [
                net.double()(*pair).item()
                for pair in zip(inputs.split(1), targets.split(1), strict=True)
            ]
        assert result.column("loss")[step - 1] == pytest.approx(sum(losses) / 12, rel=1e-6)
        net.float()


LEAVES = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {root!r})
from common import runtime

store, rank, world_size = next(dist.rendezvous("env://"))
sys.setswitchinterval(1000)  # who wants the GIL gets it when it is given up, and not before
for turn in range(30):
    dist.init_process_group("gloo", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=world_size)
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    ddp(torch.ones(8, 64)).sum().backward()
    runtime.all_gather("as at the end of training")
    runtime.shutdown()
    del ddp
    if rank == 0:
        print(turn, flush=True)
os._exit(0)  # as exits.run
"""


@pytest.mark.full
def test_no_rank_hangs_after_its_last_line(tmp_path):
    """gloo's destructor joins threads that may want the GIL, and DDP would run it with the GIL held."""
    (tmp_path / "leaves.py").write_text(LEAVES.format(root=str(ROOT)), encoding="utf-8")
    result = run(tmp_path / "leaves.py", tmp_path, nproc=2)
    assert result.code == 0, result.err
    assert result.out.split() == [str(turn) for turn in range(30)]


UNEQUAL = """
import time
import torch.nn.functional as F
from training.batches import Batches
rank = os.environ["RANK"]
stream = Batches.stream
loss = F.cross_entropy
slow_forwards = iter([1.0])

def slow_stream(*args, **how):
    for micro_batch in stream(*args, **how):
        time.sleep(0.25)
        yield micro_batch

def slow_loss(*args, **how):
    time.sleep(next(slow_forwards, 0))
    return loss(*args, **how)

if rank == "0":
    Batches.stream = slow_stream
else:
    F.cross_entropy = slow_loss
"""


def test_the_slowest_rank_is_that_of_one_micro_batch(tmp_path):
    # Of eight micro-batches rank 0 loads each in 0.25 s, and rank 1 needs 1 s for a forward.
    script = with_prelude(SCRIPT, tmp_path, UNEQUAL)
    flags = ("--steps", 1, "--global-batch-size", 16, "--micro-batch-size", 1)
    result = train(script, tmp_path, *flags, nproc=2)
    assert result.column("slowest_rank") == [1]
    assert result.column("slowest_rank_lag")[0] > 0
    # The share of time in the loader is still of all micro-batches.
    assert result.column("data_wait_share")[0] > 0.25
