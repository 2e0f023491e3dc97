"""Train on when a rank dies: without a restart, and without a checkpoint.

torchrun ends all ranks when one dies, and starts them again from the last checkpoint. But the other
ranks still hold all that data parallelism needs, the weights and the optimizer state, in memory.
They need a new process group, and they must agree on a step:

    step 4   all-reduce of gradients   vote   update                    ranks 0, 1, 2
    step 5   all-reduce of gradients   rank 1 is killed: an error       ranks 0, 2
             new process group, agree that step 4 was the last
    step 5   all-reduce of gradients   vote   update                    ranks 0, 2

The danger is a rank that has made an update which another rank has not. So no rank updates before
all have voted. A vote is a collective after the all-reduce of the gradients. If it ends on one
rank, then every rank has come to it, with the gradient of the whole batch in memory. A survivor
that did not get the result of the vote can make the same update later. Here the vote costs nothing:
it is the all-reduce of the loss.

The script starts three ranks by itself, because torchrun would end them all. One is killed by
SIGKILL at --kill-step:

    laptop    python 05_ddp/survive.py
              python 05_ddp/survive.py --kill-rank 0 --moment vote
    cluster   this script runs on one machine: on many, what starts the ranks of a node would host
              the store or connect to it, and announce the deaths

--moment all-reduce: the rank dies with its gradient in memory. Nobody can update, and the step is
repeated. --moment vote: it dies after the vote of --kill-step. One survivor has made the update,
and for another one the script pretends that the result of the vote got lost. A rank that hangs has
to be killed first.

What to look at: the seconds from the kill to the end of the next step, beside those of a restart of
two processes from a checkpoint. That checkpoint is of the same step. A real one is older, and the
steps since then come on top. The global batch stays the same: two ranks take larger shares of it.

On GPUs: the ranks of this lesson use gloo on the CPU. An NCCL collective raises no error when a
rank dies: its kernel waits. There, a thread has to wait for the announcement of the death and to
call dist.distributed_c10d._abort_process_group() in place of destroy_process_group, with
TORCH_NCCL_ASYNC_ERROR_HANDLING=0, so that torch does not end the process first. This has not been
tried here.

Previous: stragglers.py. Next: ../launch/, many machines.
"""

import copy
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _survive as helper
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import lesson, runtime

TIMEOUT = timedelta(seconds=60)


@dataclass
class Training:
    """Hold what stays in the memory of a rank when another rank dies."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0  # the last step whose update this rank has made
    reduced_step: int = 0  # the last step whose gradient, of the whole batch, this rank has had


# --- one step


def train_step(training: Training, rows: Tensor, plan: helper.Plan) -> float:
    """Train on this rank's share of the rows, and return the loss of all of them.

    Raise RuntimeError if a rank has died. Then this rank has not made the update.
    """
    step = training.step + 1
    share = rows[dist.get_rank() :: dist.get_world_size()]
    training.optimizer.zero_grad()
    # A sum over the share, divided by the size of the whole batch: the shares need not be equal.
    loss = training.model(share[:, :-1], share[:, 1:], reduction="sum") / rows[:, 1:].numel()
    loss.backward()
    plan.kill_myself(step, "all-reduce")

    for parameter in training.model.parameters():
        dist.all_reduce(parameter.grad)  # if this fails, some gradients may be sums, and some not
    training.reduced_step = step

    # The vote: if it ends here, every rank has the gradient.
    loss = loss.detach()
    dist.all_reduce(loss)
    plan.kill_myself(step, "vote")
    plan.lose_result(step)

    training.optimizer.step()
    training.step = step
    return loss.item()


# --- after a death


def recover(training: Training, store: dist.Store, me: int, generation: int) -> None:
    """Create a process group of the survivors, and bring them to the same step."""
    if dist.is_initialized():
        # Close the connections. A rank that still waits for this one gets an error, too.
        dist.destroy_process_group()
    # The parent knows who has died. This waits until it says so.
    members = json.loads(store.get(f"members of generation {generation}"))
    dist.init_process_group(
        "gloo",
        # The store outlives every rank, because the parent hosts it. A new prefix hides the keys
        # of the old group.
        store=dist.PrefixStore(f"generation {generation}", store),
        rank=members.index(me),
        world_size=len(members),
        timeout=TIMEOUT,
    )

    # No two ranks are more than one update apart: the next vote needs them all.
    newest = torch.tensor(training.step)
    dist.all_reduce(newest, op=dist.ReduceOp.MAX)
    if training.step < newest:
        assert training.reduced_step == training.step + 1 == newest
        training.optimizer.step()  # the gradient is still there
        training.step = int(newest)


# --- a rank


def run_rank(args) -> int:
    """Train until --steps, and tell the parent the losses and the times."""
    torch.set_num_threads(1)
    runtime.end_with_torchrun()  # end if the parent is killed
    me = int(os.environ["RANK"])
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
    training = Training(*helper.build(args))
    folder = Path(os.environ[helper.FOLDER])
    batches = torch.load(folder / "batches.pt")  # [steps, GLOBAL_BATCH, tokens + 1]
    plan = helper.Plan(args, me, store)
    generation = 0
    if helper.RESTARTED in os.environ:
        generation = int(os.environ[helper.RESTARTED])
        training.step = helper.load_checkpoint(folder, training.model, training.optimizer)
    recover(training, store, me, generation)

    report = {"losses": {}, "start": training.step}
    survived = None  # a copy of what was in memory when training went on
    while training.step < args.steps:
        try:
            loss = train_step(training, batches[training.step], plan)
        except RuntimeError:
            loss = None
            report["noticed"] = time.time()
        # Recover after the `except` block: inside of it, the error refers to the old group, whose
        # connections then stay open. Ranks that wait for this one would notice nothing.
        if loss is None:
            step = training.step
            generation += 1
            recover(training, store, me, generation)
            report["recovered"] = time.time()
            report["caught_up"] = training.step > step
            report["start"] = training.step
            survived = copy.deepcopy(training)
            continue
        report["losses"][training.step] = loss
        if training.step == report["start"] + 1:
            report["first_step"] = time.time()

    report["digest"] = helper.digest(training.model)
    if survived is not None and dist.get_rank() == 0:  # for the check: nobody has needed it so far
        helper.save_checkpoint(folder, survived.model, survived.optimizer, survived.step)
    runtime.shutdown()
    store.set(f"report {generation} {me}", json.dumps(report))
    return 0


def main() -> int:
    args = helper.parse_flags(__doc__)
    if helper.FOLDER in os.environ:
        return run_rank(args)

    with helper.Ranks(args) as ranks:
        survivors = ranks.run(range(helper.RANKS), killed=args.kill_rank)
        restarted = ranks.run(range(helper.RANKS - 1), killed=None)
        undisturbed = helper.train_alone(args, ranks.folder)
        rows = helper.rows_of(ranks, survivors, restarted)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(args, survivors, restarted, undisturbed),
        args=args,
        device=torch.device("cpu"),
        dtype="fp32",
        world_size=helper.RANKS,
        caught_up=[me for me, report in survivors.items() if report["caught_up"]],
        last_common_step=next(iter(survivors.values()))["start"],
        losses=[loss for _, loss in helper.losses_of(survivors)],
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
