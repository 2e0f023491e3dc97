"""How a model is trained and spread over GPUs, and what cannot be."""

from dataclasses import dataclass

from planner.frameworks import FRAMEWORKS, LOSSES
from planner.shape import Shape

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
CHECKPOINTING = ("none", "full", "selective")
OPTIMIZERS = {  # bytes of state per parameter
    "adamw": 8.0,  # two fp32 numbers
    "adamw-8bit": 2 + 2 * 4 / 256,  # and an fp32 maximum per block of 256 for each
    # one fp32 momentum; embeddings and vectors, which AdamW updates, are counted alike
    "muon": 4.0,
}


@dataclass(frozen=True)
class Plan:
    """gpus = pp x dp x cp x tp, ranks counted with tp fastest; ep of a stage's ranks divide the experts."""

    gpus: int = 1
    zero: int = 0  # 3 is FSDP
    tp: int = 1  # tensor parallel, with sequence parallel
    pp: int = 1  # pipeline stages, 1F1B
    cp: int = 1  # context parallel
    ep: int = 1  # expert parallel
    replicate: int = 1  # copies of the sharded model (HSDP)
    virtual: int = 1  # parts of the model per pipeline rank (interleaved 1F1B)
    seq_len: int = 4096
    micro_batch_size: int = 1
    micro_batches: int = 1  # per optimizer step and data-parallel rank
    dtype: str = "bf16"
    checkpointing: str = "none"
    optimizer: str = "adamw"
    framework: str = "ours"
    loss: str = "plain"
    on_cpu: bool = False
    async_tp: bool = False  # tensor parallel's collectives run in parts beside parts of the matmuls
    fp8: str = ""  # linear layers in 8 bits: "tensorwise" or "rowwise" scales
    # the rank of LoRA's A and B beside frozen matrices; 0: all weights are trained
    adapters: int = 0
    # numbers per token and layer that checkpointing keeps beyond its usual ones; below 0: fewer
    kept_besides: int = 0

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    # ranks over which ZeRO and FSDP divide: context-parallel ones hold the same weights
    def shards(self) -> int:
        return self.dp * self.cp // self.replicate

    @property
    def expert_shards(self) -> int:  # ranks that hold the same experts
        return self.gpus // (self.pp * self.ep * self.replicate)

    @property
    def tokens(self) -> float:  # of a micro-batch on one rank
        return self.seq_len * self.micro_batch_size / self.cp


def check(shape: Shape, plan: Plan) -> None:
    """ValueError that names the first setting that cannot be."""
    choices = {"dtype": DTYPES, "checkpointing": CHECKPOINTING, "optimizer": OPTIMIZERS}
    for name, known in {**choices, "framework": FRAMEWORKS, "loss": LOSSES}.items():
        if getattr(plan, name) not in known:
            raise ValueError(f"--{name} {getattr(plan, name)!r} is none of {', '.join(known)}")
    for name in (
        "gpus",
        "tp",
        "pp",
        "cp",
        "ep",
        "replicate",
        "seq_len",
        "micro_batch_size",
        "micro_batches",
    ):
        if getattr(plan, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(plan, name)} is not at least 1")
    if plan.ep > 1 and not shape.experts:
        raise ValueError(f"--ep {plan.ep}: {shape.name} has no experts")
    if plan.replicate > 1 and plan.zero < 3:
        raise ValueError(f"--replicate {plan.replicate} is of FSDP: use --zero 3, or leave it out")
    if plan.adapters and (shape.experts or shape.kv_rank or plan.tp * plan.pp * plan.cp > 1):
        raise ValueError(
            f"--adapters {plan.adapters} is of 06_fsdp_zero/finetune.py: a Llama, --tp, --pp and --cp 1"
        )
    divides("--tp x --pp x --cp", plan.tp * plan.pp * plan.cp, "--gpus", plan.gpus)
    divides("--tp", plan.tp, "attention heads", shape.heads)
    divides("--tp", plan.tp, "key-value heads", shape.heads if shape.kv_rank else shape.kv_heads)
    divides("--tp", plan.tp, "columns of the feed-forward part", shape.ffn)
    divides("--tp x --cp", plan.tp * plan.cp, "tokens of a sequence", plan.seq_len)
    divides("--replicate", plan.replicate, "data-parallel ranks", plan.dp)
    divides(
        "--ep",
        plan.ep,
        "ranks of a pipeline stage and replica",
        plan.gpus // plan.pp // plan.replicate,
    )
    if plan.pp > shape.layers:
        raise ValueError(f"--pp {plan.pp} is more than the {shape.layers} layers of {shape.name}")
    divides("--ep", plan.ep, "experts", shape.experts or 1)


def divides(name: str, size: int, whole_name: str, whole: int) -> None:
    """ValueError unless `size` divides `whole`, with the nearest sizes that do."""
    if whole % size:
        nearest = min(
            (n for n in range(1, 2 * size) if whole % n == 0), key=lambda n: abs(n - size)
        )
        raise ValueError(
            f"{name} {size} does not divide {whole_name} {whole}: the nearest that does is {nearest}"
        )
