"""How a model is trained and spread over GPUs: a Plan, its checks, and the scripts' defaults."""

from dataclasses import dataclass

from common import hardware
from lm.stages import STAGES_PER_RANK
from planner.shape import Shape
from training.defaults import default_flags

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes of a number
CHECKPOINTING = ("none", "full", "selective")
OPTIMIZERS = {  # bytes of state per parameter
    "adamw": 8.0,  # two fp32 numbers
    "adamw-8bit": 2 + 2 * 4 / 256,  # two bytes, and for each an fp32 maximum per block of 256
    "muon": 4.0,  # one fp32 momentum; embeddings and vectors, which AdamW updates, count alike
}
LOSSES = {
    "plain": "F.cross_entropy of fp32 logits",
    "fused": "torch.compile of head and loss: the logits stay in 16 bits",
    "parallel": "tensor ranks share the vocabulary (loss_parallel)",
    "chunked": "head and loss in eight chunks, of which one is alive (--loss chunked)",
}
CHUNKS = 8  # of lm/loss.py, which needs torch
GROUP = 64  # of lm/lora.py: so many weights in 4 bits share a scale and a minimum


@dataclass(frozen=True)
class Defaults:
    """The settings of a training script that is started without flags."""

    model: str
    dtype: str
    compile: bool
    checkpointing: str
    global_batch_size: int  # sequences per step, all ranks
    # --seq-len is that of lm.shapes.recipe, --micro-batch-size is a rank's share of the batch


def script_defaults(device: str, model: str | None) -> Defaults:
    """Return the defaults of the training scripts on a device: "cpu" or a GPU's name.

    `model` is --model, or None if it is not given. --dtype defaults to bf16 where the hardware
    multiplies it.
    """
    flags = default_flags(on_gpu=device != "cpu", model=model)
    return Defaults(
        model=flags.model,
        dtype="bf16" if hardware.peak_flops(device, "bf16") else "fp32",
        compile=flags.compile,
        checkpointing="none",
        global_batch_size=flags.global_batch_size,
    )


@dataclass(frozen=True)
class Plan:
    """A model on `gpus` = pp x dp x cp x tp ranks, counted with tp fastest.

    ep of a stage's ranks share the experts, which tensor parallelism does not shard. fully_shard
    shards what they hold over the ranks that hold the same experts.
    """

    gpus: int = 1
    zero: int = 0  # what data-parallel ranks shard: 0 nothing (DDP), 3 everything (FSDP)
    deepspeed: bool = False  # zero 3 by train_zero.py, which also has 1 and 2, and not by FSDP
    tp: int = 1  # tensor parallel, with sequence parallel
    pp: int = 1  # pipeline ranks
    schedule: str = "1f1b"  # of the pipeline; "interleaved" has two stages on each rank
    reshard_after_forward: bool = False  # of a pipeline's FSDP; without a pipeline it always does
    cp: int = 1  # context parallel
    ring: bool = False  # context parallel by a ring in zigzag order, which train_3d.py has not
    ep: int = 1  # expert parallel
    replicate: int = 1  # copies of the sharded model (HSDP)
    seq_len: int = 4096
    micro_batch_size: int = 1
    micro_batches: int = 1  # per optimizer step and data-parallel rank: gradient accumulation
    dtype: str = "bf16"
    compile: bool = False
    checkpointing: str = "none"
    optimizer: str = "adamw"
    loss: str | None = None  # None: what the script computes, see loss_method
    adapters: int = 0  # rank of LoRA's A and B beside frozen matrices; 0: all weights are trained
    weights: str = "auto"  # frozen matrices of blocks: in dtype, or "int4", in 4.5 bits a weight
    on_cpu: bool = False

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on a rank."""
        return STAGES_PER_RANK[self.schedule]

    @property
    def stages(self) -> int:
        """Pipeline stages on all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def dp(self) -> int:
        """Ranks that read different sequences."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def shards(self) -> int:
        """Ranks that shard weights with each other. Context-parallel ranks are among them."""
        return self.dp * self.cp // self.replicate

    @property
    def expert_shards(self) -> int:
        """Ranks that hold the same experts."""
        return self.gpus // (self.pp * self.ep * self.replicate)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.seq_len * self.micro_batch_size / self.cp

    @property
    def is_ddp(self) -> bool:
        """True if DistributedDataParallel averages the gradients."""
        return self.zero == 0 and self.shards > 1

    @property
    def is_fsdp(self) -> bool:
        """True if fully_shard shards the weights."""
        return self.zero == 3 and not self.deepspeed

    @property
    def uses_deepspeed(self) -> bool:
        """True if train_zero.py runs the plan: no other script has ZeRO-1 and ZeRO-2."""
        return self.deepspeed or self.zero in (1, 2)

    @property
    def loss_method(self) -> str:
        """The key of LOSSES: `loss`, or what the script computes without a flag.

        --compile compiles the head with the loss, except in train_3d.py and finetune.py.
        """
        if self.loss is not None:
            return self.loss
        if self.adapters:
            return "chunked"
        if self.tp > 1:
            return "parallel"
        if self.compile and self.pp == self.cp == 1:
            return "fused"
        return "plain"


def check(shape: Shape, plan: Plan) -> None:
    """Raise ValueError that names the first setting that cannot be."""
    _check_values(plan)
    if plan.ep > 1 and not shape.experts:
        raise ValueError(f"--ep {plan.ep}: {shape.name} has no experts")
    if plan.replicate > 1 and plan.zero < 3:
        raise ValueError(f"--replicate {plan.replicate} is of FSDP: use --zero 3, or leave it out")
    one_way = plan.tp * plan.pp * plan.cp == 1
    if plan.adapters and (shape.kv_rank or not one_way):
        raise ValueError(
            f"--adapters {plan.adapters} is of 06_fsdp_zero/finetune.py: "
            "a Llama or Qwen3-MoE, --tp, --pp and --cp 1"
        )
    if plan.weights == "int4" and not plan.adapters:
        raise ValueError("--weights int4 is of frozen weights: add --adapters 16, or leave it out")
    if plan.weights == "int4" and shape.experts:
        raise ValueError(f"--weights int4: experts of {shape.name} stay in --dtype: leave it out")
    if plan.uses_deepspeed and not one_way:
        raise ValueError(
            f"--zero {plan.zero} by DeepSpeed (06_fsdp_zero/train_zero.py) has --tp, --pp and "
            "--cp 1: use --zero 0, or 3 without --framework deepspeed"
        )

    divides("--tp x --pp x --cp", plan.tp * plan.pp * plan.cp, "--gpus", plan.gpus)
    divides("--tp", plan.tp, "attention heads", shape.heads)
    divides("--tp", plan.tp, "key-value heads", shape.heads if shape.kv_rank else shape.kv_heads)
    divides("--tp", plan.tp, "columns of the feed-forward part", shape.ffn)
    divides("--tp x --cp", plan.tp * plan.cp, "tokens of a sequence", plan.seq_len)
    if plan.cp > 1:  # a rank has two chunks of each sequence
        divides("2 x --cp", 2 * plan.cp, "tokens of a sequence", plan.seq_len)
    divides("--replicate", plan.replicate, "data-parallel ranks", plan.dp)
    stage_ranks = plan.gpus // plan.pp // plan.replicate
    divides("--ep", plan.ep, "ranks of a pipeline stage and replica", stage_ranks)
    if plan.stages > shape.layers:
        raise ValueError(
            f"--pp {plan.pp} --schedule {plan.schedule} has {plan.stages} stages, more than the "
            f"{shape.layers} layers of {shape.name}"
        )
    if plan.pp == 1 and plan.schedule != "1f1b":
        raise ValueError(f"--schedule {plan.schedule} is of a pipeline: add --pp, or leave it out")
    divides("--ep", plan.ep, "experts", shape.experts or 1)


def _check_values(plan: Plan) -> None:
    """Raise ValueError for a value that no plan can have."""
    choices = {
        "dtype": DTYPES,
        "checkpointing": CHECKPOINTING,
        "optimizer": OPTIMIZERS,
        "loss": (None, *LOSSES),
        "schedule": STAGES_PER_RANK,
        "weights": ("auto", "int4"),
    }
    for name, known in choices.items():
        value = getattr(plan, name)
        if value not in known:
            names = ", ".join(choice for choice in known if choice)
            raise ValueError(f"--{name} {value!r} is none of {names}")

    sizes = ("gpus", "tp", "pp", "cp", "ep", "replicate")
    for name in (*sizes, "seq_len", "micro_batch_size", "micro_batches"):
        value = getattr(plan, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not at least 1")


def divides(name: str, size: int, whole_name: str, whole: int) -> None:
    """Raise ValueError, which has the nearest size that does, unless `size` divides `whole`."""
    if whole % size == 0:
        return
    divisors = [n for n in range(1, 2 * size) if whole % n == 0]
    nearest = min(divisors, key=lambda n: abs(n - size))
    raise ValueError(
        f"{name} {size} does not divide {whole_name} {whole}: the nearest that does is {nearest}"
    )
