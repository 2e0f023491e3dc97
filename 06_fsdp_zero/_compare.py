"""The flags, the memory counter, the formulas and the checks of compare.py."""

import argparse
import math
import warnings
import weakref

import torch
from _sharding import zero_formula
from torch import Tensor, nn

from common import cli, exits, lesson, measure
from lm import shapes

# Warnings of the dry run, and of RMS norms whose weight is fp32 and whose input is bf16.
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")

COLLECTIVES = ("all_gathers", "reduce_scatters", "all_reduces")
# Relative, between losses: what another order of the same sums may change. In bf16 the methods also
# round at different places.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
COLUMNS = {
    "method": "method",
    "parameter_bytes_per_rank": "weights",
    "gradient_bytes_per_rank": "gradients",
    "optimizer_bytes_per_rank": "AdamW",
    "peak_memory_bytes": "peak",
    "calls": "gathers, scatters, reduces",
    "bytes_sent_per_rank_per_step": "bytes sent a step",
    "tokens_per_second": "speed",
}


# --- flags


def parse_flags(doc: str, gpu_defaults: dict) -> argparse.Namespace:
    """Parse the flags. Raise UserError if they contradict each other."""
    cpu_defaults = {"model": "nano", "micro_batch_size": 1, "dtype": "fp32"}
    help_text = {}
    for name, cpu_default in cpu_defaults.items():
        help_text[name] = f"(default: {cpu_default}, on a GPU {gpu_defaults[name]})"
    parser = cli.Parser(doc)
    parser.add_argument("--model", help=f"as in train_fsdp.py {help_text['model']}")
    parser.add_argument(
        "--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model)"
    )
    parser.add_argument(
        "--micro-batch-size",
        type=cli.positive_int,
        help=f"sequences per rank {help_text['micro_batch_size']}",
    )
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help=f"of the matmuls {help_text['dtype']}, in a dry run bf16",
    )
    parser.add_argument(
        "--checkpointing",
        choices=("none", "full"),
        default="none",
        help="full: recompute activations in backward",
    )
    parser.add_argument(
        "--replicate",
        type=cli.positive_int,
        help="copies of the model in HSDP (default: one for each 8 ranks, at least 2)",
    )
    parser.add_argument(
        "--steps",
        type=cli.positive_int,
        default=5,
        help="timed steps of each method, after the counted one",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="count as rank 0 of --world-size, in one process"
    )
    parser.add_argument("--world-size", type=cli.positive_int, help="number of ranks in a dry run")
    cli.add_device_and_json(parser)
    args = parser.parse_args()

    if args.dry_run and args.world_size is None:
        raise exits.UserError("--dry-run needs --world-size: the number of ranks")
    if args.world_size is not None and not args.dry_run:
        raise exits.UserError(
            f"--world-size {args.world_size} needs --dry-run; "
            "without it torchrun gives the number of ranks"
        )
    if args.dry_run:
        args.device = "cpu"
        cpu_defaults["dtype"] = "bf16"
    lesson.fill_defaults(args, cpu_defaults, gpu_defaults, relaunches=True)
    if args.seq_len is None:
        args.seq_len = shapes.recipe(args.model).seq_len
    return args


def choose_copies(replicate: int | None, world_size: int) -> int:
    """Return the copies of the model in HSDP: --replicate, or one for each 8 ranks, at least 2.

    Raise UserError if --replicate does not divide the number of ranks.
    """
    if replicate is None:
        return max(2, world_size // 8)
    if world_size % replicate != 0:
        raise exits.UserError(
            f"--replicate {replicate} does not divide {world_size} processes: use a divisor"
        )
    return replicate


def choose_methods(copies: int, world_size: int) -> list[str]:
    """Return the methods that so many ranks can train with."""
    methods = ["DDP", "FSDP"]
    # HSDP with one copy would be FSDP, and with as many copies as ranks it would be DDP.
    if 1 < copies < world_size and world_size % copies == 0:
        methods.append("HSDP")
    return methods


# --- memory


class SummedBytes(measure.OperatorBytes):
    """Count the bytes in use as a running sum, which each new, resized or freed storage changes.

    The base class adds up all storages after each operator. For a model of 80 layers that would
    take minutes.
    """

    def __init__(self) -> None:
        self._bytes_by_storage: dict[int, int] = {}
        self._sum = 0
        super().__init__()

    def __enter__(self) -> "SummedBytes":
        # fully_shard frees and allocates weights by resizing their storages.
        self._torch_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = self._torch_resize(storage, size)
            if storage._cdata in self._bytes_by_storage:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize
        super().__enter__()
        return self

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._torch_resize
        super().__exit__(*error)

    @property
    def now(self) -> int:
        return self._sum

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bytes_by_storage:
            weakref.finalize(storage, self._remove, storage._cdata)
        self._set(storage._cdata, storage.nbytes())

    def _set(self, address: int, size: int) -> None:
        self._sum += size - self._bytes_by_storage.get(address, 0)
        self._bytes_by_storage[address] = size

    def _remove(self, address: int) -> None:
        self._sum -= self._bytes_by_storage.pop(address, 0)


def step_memory(device: torch.device) -> measure.AllocatorBytes | SummedBytes:
    """Return a counter of the bytes in use, whose peak can begin anew for each step."""
    if device.type == "cuda":
        return measure.AllocatorBytes(device)
    return SummedBytes()


# --- formulas and checks


def fully_shard_formula(
    net: nn.Module, ranks: int, copies: int, gathered_bytes: int
) -> dict[str, int]:
    """Compute what rank 0 holds, calls and sends in a step of FSDP, or of HSDP with several copies.

    Weights, gradients and AdamW's state are fp32. `gathered_bytes` is the size of an element of the
    weights that are gathered. A tensor is sharded by rows: rank 0 has ceil(rows / shards) of them.
    All ranks send as much as rank 0, because they pad their shards to its size.
    """
    shards = ranks // copies
    shard = 0  # elements of rank 0
    shard_of_blocks = 0
    tensors = 0
    for name, parameter in net.named_parameters():
        rows = math.ceil(parameter.shape[0] / shards)
        elements = rows * parameter.shape[1:].numel()
        shard += elements
        if name.startswith("model.layers."):
            shard_of_blocks += elements
        tensors += 1
    blocks = len(net.model.layers)
    # The other groups: the embedding, and final norm with head. A tied model has one group of both.
    groups = blocks + (1 if net.config.tie_word_embeddings else 2)

    # A block is gathered twice, for forward and for backward, and every other group once.
    gathered = gathered_bytes * (shard + shard_of_blocks) * (shards - 1)
    scattered = 4 * shard * (shards - 1)
    all_reduced = 2 * 4 * shard * (copies - 1) / copies  # between the copies
    formula = {
        "parameter_bytes_per_rank": 4 * shard,
        "gradient_bytes_per_rank": 4 * shard,
        # Two moments of each element, and a step count for each tensor.
        "optimizer_bytes_per_rank": 8 * shard + 4 * tensors,
        "all_gathers_per_step": 0,
        "reduce_scatters_per_step": 0,
        "all_reduces_per_step": 0,
        "bytes_sent_per_rank_per_step": round(gathered + scattered + all_reduced),
    }
    if shards > 1:
        formula["all_gathers_per_step"] = blocks + groups
        formula["reduce_scatters_per_step"] = groups
    if copies > 1:
        formula["all_reduces_per_step"] = groups
    return formula


def check_rank0_holds_most(method: str, counts_of_ranks: list[dict]) -> None:
    """Assert that no rank holds or sends more than rank 0, whose counts are shown."""
    for key, of_rank0 in counts_of_ranks[0].items():
        if key == "peak_memory_bytes":
            continue
        of_ranks = [counts[key] for counts in counts_of_ranks]
        assert of_rank0 == max(of_ranks), f"{method}: {key} by rank: {of_ranks}"


def check(
    rows: list[dict], net: nn.Module, args: argparse.Namespace, gathered_bytes: int
) -> list[str]:
    """Assert that the counts are those of the formulas, and that the losses are equal."""
    for row in rows:
        method = row["method"]
        if method == "DDP":
            expected = zero_formula(0, net, args.world_size)
            if not args.dry_run:
                del expected["all_reduces_per_step"]  # one for each bucket of DDP
        else:
            copies = args.replicate if method == "HSDP" else 1
            expected = fully_shard_formula(net, args.world_size, copies, gathered_bytes)
        for key, value in expected.items():
            assert row[key] == value, f"{method}: {key} is {row[key]:,}, and must be {value:,}"
    checked = ["on rank 0, bytes held, calls and bytes sent are those of the formulas"]
    if args.dry_run:
        return checked

    expected_loss = rows[0]["loss"]
    tolerance = TOLERANCE[args.dtype]
    for row in rows:
        assert math.isclose(row["loss"], expected_loss, rel_tol=tolerance), (
            f"{row['method']}: its loss is {row['loss']}, and DDP's is {expected_loss}"
        )
    checked.append(f"every method has DDP's loss, {expected_loss:.4f}, within {tolerance:g}")
    return checked


def deepspeed_formula(stage: int, net: nn.Module, ranks: int) -> dict[str, int | None]:
    """Compute what a rank holds and sends with DeepSpeed's ZeRO-1 or 2, and fp32 gradients.

    DeepSpeed 0.19.8 all-reduces the gradients, where the paper reduce-scatters them, and
    all-gathers the new weights, in buckets of a size that its configuration sets. Its optimizer
    also holds a copy of the weights that it updates. Padding is left out.
    """
    row = zero_formula(stage, net, ranks)
    total = sum(parameter.numel() for parameter in net.parameters())
    row["optimizer_bytes_per_rank"] += 4 * math.ceil(total / ranks)
    row["all_gathers_per_step"] = None
    row["reduce_scatters_per_step"] = 0
    row["all_reduces_per_step"] = None
    row["bytes_sent_per_rank_per_step"] = round(4 * (2 + 1) * total * (ranks - 1) / ranks)
    return row


def with_zero(rows: list[dict], net: nn.Module, world_size: int) -> list[dict]:
    """Return the rows with ZeRO's rows after the first, and with a text for the calls."""
    ddp, *sharded = rows
    all_rows = [ddp]
    for stage in (1, 2, 3):
        method = f"ZeRO-{stage} (formula)"
        all_rows.append({"method": method, **zero_formula(stage, net, world_size)})
        if stage < 3:
            method = f"ZeRO-{stage}, DeepSpeed (formula)"
            all_rows.append({"method": method, **deepspeed_formula(stage, net, world_size)})
    all_rows += sharded
    for row in all_rows:
        calls = []
        for kind in COLLECTIVES:
            count = row[f"{kind}_per_step"]
            calls.append("per bucket" if count is None else str(count))
        row["calls"] = ", ".join(calls)
        row["world_size"] = world_size
    return all_rows
