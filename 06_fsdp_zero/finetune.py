"""Fine-tune a Llama, Mistral, Qwen2 or Qwen3, or a mixture of experts (Mixtral, Qwen3-MoE).

It trains on your chats, on one or many GPUs: LoRA adapters, or all weights. This is train_fsdp.py
with three changes. For other models take TRL or axolotl.

1. The model's chat template turns a chat into tokens. Only answers of the assistant are targets.
2. Rows have unequal numbers of targets. A mean of the ranks' means would weight them wrongly. Each
   rank sums its losses and multiplies by world_size / T. T is the number of targets in the global
   batch.
3. With --adapters the weights are frozen in --dtype and sharded as before. A and B beside each
   matrix are trained in fp32, in the same FSDP groups. In bf16 a frozen weight takes 2 / N bytes on
   each of N ranks, with --weights int4 it takes 0.56 / N. A trained weight takes 16 / N.

In a mixture of experts, padding passes no expert, and adapters are in attention alone. With --ep N,
N ranks share the experts of a layer, as in 08_model_parallel/train_3d.py.

    laptop    torchrun --standalone --nproc_per_node=2 06_fsdp_zero/finetune.py
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/finetune.py --run-dir runs/70b \
              --model models/llama-70b --data chats.jsonl --adapters 16 --checkpointing full \
              --seq-len 4096 --global-batch-size 32 --micro-batch-size 1 --steps 500
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

A line of --data is {"messages": [{"role", "content"}, ...]} or {"prompt", "completion"}, and may
have "tools". ShareGPT's and Alpaca's keys are read, too, and {"text"}, of which each token is a
target. 5 % of the chats are held out. With --eval-data FILE, the chats of FILE are held out,
and all chats of --data are trained on. Without flags the script takes eight steps on the pairs of
07_memory_tricks/lora.py, with the model that `make model` makes. If that is not there, it trains
nano on bytes, from random weights.

What to look at: the size of an epoch; which tokens of the first row are targets; three held-out
questions, answered before and after. The run's folder has adapter/ for peft, model/ for programs
that read Hugging Face folders, and checkpoints that --resume continues on any number of ranks. MFU
counts the arithmetic of full training, of which adapters leave out a third.
Previous: train_fsdp.py. Next: 07_memory_tricks/lora.py, for LoRA and QLoRA on one device;
09_inference/, to serve model/.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _finetune
import torch
import torch.distributed as dist
from _sharding import bytes_of_training, shard_experts, shard_groups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from common import hardware, report, runtime
from lm import balance, chats, lora, packing, shapes, training_rows, weights
from lm.activation_checkpointing import checkpoint_blocks
from lm.loss import use_loss
from training import checkpoint, flags, micro_batch, optim
from training.batches import PADDING, Batches
from training.digest import digest
from training.meter import Meter

ROOT = Path(__file__).resolve().parents[1]
REAL_MODEL = ROOT / "models/smollm2-135m"  # make model
DEFAULTS = {  # eight steps on 29 pairs; 3 of the 32 are held out
    "model": str(REAL_MODEL) if REAL_MODEL.is_dir() else "nano",
    "data": str(ROOT / "07_memory_tricks/lora_instructions.jsonl"),
    "seq_len": 1024,  # at most: the longest row decides
    "lr": 0.0,  # a stand-in: it depends on --adapters
    "warmup_steps": 2,
    "weight_decay": 0.0,
    "global_batch_size": 6,
    "steps": 8,
    "loss": "chunked",
}


def encode_answer(
    chat: chats.Chat, messages: list[dict], position: int, tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and the ids that the model has to answer with.

    position: index of the answer in messages. The prompt's ids are those that the model is asked
    with. The last ids of the answer make generation stop. Raise ValueError if they do not.

        [..., {"role": "assistant", "content": "hello"}]
        prompt  ... <|im_start|> assistant \\n
        answer  hello <|im_end|> \\n
    """
    prompt_text, answer_text = chats.render_answer(chat, messages, position, tools)
    prompt = chat.encode(prompt_text)
    turn = chat.encode(prompt_text + answer_text)
    answer = turn[len(prompt) :]
    if turn[: len(prompt)] != prompt:  # a token reaches across the border
        answer = chats.encode_apart(chat, answer_text)
    if not chat.has_end(answer):
        raise ValueError(
            f"message {position + 1}: the chat template writes no token behind the answer at which"
            " generation stops: write {{ eos_token }} there"
        )
    return [*chat.start, *prompt], answer


def chat_rows(
    chat: chats.Chat,
    messages: list[dict],
    tools: list[dict] | None = None,
    first_answer: int = 1,
) -> list[tuple[list[int], list[bool]]]:
    """Return the rows of a chat: the token ids of each, and which of them are targets.

    Targets are the ids of the assistant's answers, with those that end them:

        ids      <|user|> hi <|assistant|> hello <eos> <|user|> bye <|assistant|> bye <eos>
        targets  -        -  -             hello <eos> -        -   -             bye <eos>

    The model is asked with the ids of a prompt, so a row begins with the ids of its prompt. The
    next answer joins the row if its prompt continues the row. If the template rewrites an earlier
    answer (Qwen3's removes its thoughts), the prompt does not, and a new row begins.

    first_answer: index of the first message that can be an answer.
    Raise ValueError if the template writes an answer that does not follow its prompt or never ends.
    """
    rows = []
    for position in range(first_answer, len(messages)):
        if messages[position]["role"] != "assistant":
            continue
        prompt, answer = encode_answer(chat, messages, position, tools)
        targets = [False] * len(prompt)
        if rows:
            row, earlier_targets = rows[-1]
            if prompt[: len(row)] == row:  # the prompt continues the row
                targets[: len(row)] = earlier_targets
                rows.pop()
        rows.append((prompt + answer, targets + [True] * len(answer)))
    return rows


def shard_model(model, args, device) -> None:
    """Shard the model, allocate the shards, read the weights and initialize the adapters."""
    options = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        # Weights are gathered in args.dtype. Gradients are averaged in fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=runtime.DTYPES[args.dtype],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": OffloadPolicy(),
    }
    if args.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    if args.compile:  # before a block is sharded
        for block in model.model.layers.values():
            block.compile(fullgraph=True)
    if args.ep > 1:  # a mesh of their own, so they are no part of their block's group
        shard_experts(model, args.ep, options)
    shard_groups(model, options)
    weights.materialize(
        model, args.model, seed=args.seed, device="cpu" if args.cpu_offload else device
    )
    if args.weights == "int4":
        _finetune.quantize_weights(model, args.model)
    _finetune.init_adapters(model, args.seed)


def main() -> int:
    parser = flags.TrainingParser(__doc__)
    _finetune.add_flags(parser)
    parser.set_defaults(**DEFAULTS)
    args = parser.parse_args()
    _finetune.choose_adapters(args)
    runtime.seed_all(args.seed, args.deterministic)

    # 1. Join the job, as 05_ddp/train.py does.
    device = runtime.init_process_group(args.device)
    rank, world_size, _ = runtime.ranks()
    if not shapes.has_weights(args.model):
        runtime.print0(
            f"{args.model} starts from random weights: `make model` makes a pretrained one, "
            f"{REAL_MODEL.relative_to(ROOT)}"
        )
    args.dtype = hardware.choose_dtype(args.dtype, device)
    runtime.catch_stop_signals()

    # Memory: frozen weights in args.dtype or in 4 bits. Adapters are small and are not counted.
    bytes_per_parameter = weights.TRAINING_BYTES
    if args.adapters:
        bytes_per_parameter = runtime.DTYPES[args.dtype].itemsize
    if args.weights == "int4":
        bytes_per_parameter = 0.5
    weights.check_model(
        args.model,
        "cpu" if args.cpu_offload else device,
        copies=1,
        bytes_per_parameter=bytes_per_parameter,
    )

    # 2. Rows: chats as tokens, and which of them are targets.
    # A chat template may write the date. A resumed run uses the date of its start.
    date = checkpoint.start_date(args)
    mark = f"run of {date.isoformat()}"  # marks the folders that this run may replace
    inputs = parser.input_paths(args)
    runtime.on_rank0(partial(_finetune.check_folders, args, inputs, mark))
    chat = chats.read_chat_format(args.tokenizer or args.model, date)
    packed_length = args.seq_len
    corpus, held_out_chats = _finetune.load_chats(args, chat, chat_rows)
    # Rows have unequal lengths: with --compile, torch compiles a block twice, then for any length.
    rows = training_rows.Rows(corpus.train, args.seq_len, corpus.mixture)
    held_out_rows = training_rows.Rows(corpus.held_out, args.seq_len)
    train_rows = rows
    if args.packing:  # once, before the first step: epochs and batches are of packed rows
        train_rows = training_rows.PackedRows(corpus.train, packed_length)
        args.seq_len = max(args.seq_len, train_rows.longest())
    batches = Batches(train_rows, held_out_rows, args, rank=rank, world_size=world_size)
    # Padding does not count as tokens.
    batches.tokens_per_step = round(args.global_batch_size * batches.train.mean_length())
    estimate_flags = "--zero 3"
    if args.adapters:
        estimate_flags += f" --adapters {args.adapters}"
    if args.weights == "int4":
        estimate_flags += " --weights int4"
    batches.micro_batch_size = micro_batch.fixed(
        args, batches, device, most=None, estimate_flags=estimate_flags
    )
    held_out = batches.evaluation()
    padding = {}
    if args.packing:
        padding = _finetune.print_padding(rows, train_rows, batches.micro_batch_size)
    runtime.print0(
        f"{args.model}, {args.dtype} matmuls, {world_size} x {hardware.device_name(device)}"
    )

    # 3. The run's folder. Errors come now, and not after minutes of loading weights.
    config = weights.load_config(args.model, corpus.vocab_size, rows.seq_len, experts=True)
    base = {"weights of --model": weights.fingerprint(args.model)}
    settings = flags.settings(args, data=corpus.sha256, model=repr(config), **base)
    settings |= {"--adapters": args.adapters, checkpoint.DATE: date.isoformat()}
    settings |= balance.setting(args)
    if args.packing:
        settings["--packing"] = train_rows.longest()
    if args.adapters:
        settings["--alpha"] = args.alpha
        settings["--dropout"] = args.dropout
        settings["--target-modules"] = ",".join(args.target_modules)
        settings["--weights"] = args.weights
    if args.eval_data is not None:
        # other chats for evaluation may be longer, and the run has to resume with them
        settings["--seq-len"] = batches.train.longest()
    run = checkpoint.Run(args, settings=settings)

    # 4. The model: frozen weights and adapters, or all weights. Each rank holds a shard of each.
    model = weights.build(args.model, config, seed=args.seed, device="meta")
    if args.adapters:  # before fully_shard, so that A and B are in the group of their block
        # Frozen weights are never updated, so bf16 is enough. A and B get small updates, so they
        # stay fp32.
        model.to(runtime.DTYPES[args.dtype])
        lora.adapt(
            model,
            rank=args.adapters,
            alpha=args.alpha,
            dropout=args.dropout,
            target_modules=args.target_modules,
            kind=lora.QLoRALinear if args.weights == "int4" else lora.LoRALinear,
        )
        model.tie_weights()
    checkpoint_blocks(model, args.checkpointing)  # backward recomputes activations
    use_loss(model, args.loss)  # chunked: an eighth of the logits at once
    most_documents = None  # a mask keeps the chats of a packed row apart
    if args.packing and device.type == "cuda" and args.dtype == "bf16":
        packing.use_varlen(model)
        most_documents = train_rows.most_documents()
    has_experts = config.experts is not None
    unpack = partial(training_rows.unpack, most_documents=most_documents, experts=has_experts)
    expert_balance = None
    if has_experts:
        expert_balance = balance.Balance(
            model, batches, device, weight=args.balance_loss, bias_rate=0, unpack=unpack
        )
    shard_model(model, args, device)
    optimizer, scheduler = optim.adamw(
        model,
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        steps=args.steps,
        schedule=args.lr_schedule,
    )

    prompts = _finetune.questions(chat, held_out_chats, config)
    answer = partial(_finetune.greedy, chat=chat, prompts=prompts, device=device, unpack=unpack)
    val_loss_before = evaluate(model, held_out, device, unpack)
    answers_before = answer(model)

    training = {"net": model, "optimizer": optimizer, "scheduler": scheduler}
    start_step = checkpoint.resume(run, **training) if args.resume else 0
    stream = batches.stream(start_step, pin=device.type == "cuda", num_workers=args.num_workers)
    meter = Meter(
        run.folder,
        steps=args.steps,
        start_step=start_step,
        tokens_per_step=batches.tokens_per_step,
        flops_per_token=shapes.flops_per_token(config, args.seq_len),
        peak_flops=hardware.peak_flops(hardware.device_name(device), args.dtype),
        device=device,
        dtype=args.dtype,
        tensorboard=args.tensorboard,
        wandb=args.wandb,
        held_out=held_out_rows.sha256(),
    )
    run.remember_flags(args, batches.micro_batch_size)

    # 5. The training loop.
    step = start_step
    stop = 0
    bytes_per_rank = bytes_of_training([*model.parameters()], optimizer)
    steps = range(start_step + 1, args.steps + 1)
    for step in report.progress_bar(steps, "training", initial=start_step, unit="step"):
        # Dropout draws other numbers on each rank and step, and the same ones after a resume.
        runtime.seed_step(args.seed, step, rank)
        if expert_balance is not None:
            expert_balance.start_step(step)
            runtime.seed_step(args.seed, step, rank)  # start_step may have run a forward
        step_loss = torch.zeros((), device=device)
        # of all ranks: each knows the global batch, so this takes no collective
        target_count = batches.train.target_count(batches.global_batch(step - 1))
        for _ in range(batches.accumulation_steps):
            inputs, targets = meter.next(stream)
            # Packed rows have positions that begin at 0 in each chat, and a mask. Experts get
            # another mask, which says where padding is.
            inputs, masks = unpack(inputs)
            with meter.forward():
                # A micro-batch may have no target. Its sum is then 0; its mean would be NaN.
                # fully_shard averages gradients over the ranks, and world_size undoes this. Under
                # HSDP or context parallelism, call set_gradient_divide_factor(1.0) on each FSDP
                # module, and leave out world_size here and in the logged loss.
                loss_sum = model(inputs, targets, reduction="sum", **masks)
                loss = loss_sum * (world_size / target_count)
                if expert_balance is not None:
                    # Its mean over ranks and micro-batches is the loss of the global batch.
                    loss = loss + expert_balance.loss() / batches.accumulation_steps
            loss.backward()
            step_loss += loss.detach()
        grad_norm = optim.clip_grad_norm(model.parameters(), args.clip_norm)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        if step == start_step + 1:
            bytes_per_rank = bytes_of_training([*model.parameters()], optimizer)
        optimizer.zero_grad()
        values = expert_balance.end_step() if expert_balance is not None else {}

        stop = runtime.stop_requested()  # the same on all ranks, so that all of them save
        is_last_step = stop or step == args.steps
        is_save_step = args.save_every and step % args.save_every == 0
        save = is_last_step or is_save_step or runtime.save_requested()
        if save or step == 1 or step % args.log_every == 0:
            dist.all_reduce(step_loss)  # the sum over ranks: world_size x the loss per target
            meter.log(step, step_loss / world_size, grad_norm, lr, **values)
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            meter.log_eval(step, evaluate(model, held_out, device, unpack))
        if save:
            run.save(step, checkpoint.training_state(step, **training), shapes.config_json(config))
            meter.save_plot()
        if stop:
            break
    run.wait()
    if stop:
        meter.print_stop(stop, step, args.keep)

    best = None
    if args.keep_best and step == args.steps:
        best = checkpoint.load_best(run, **training)
    losses = {} if best is None else {"val_loss": best.val_loss}  # that of model/
    answers = answer(model) if step == args.steps else []

    # 6. Check that the trained weights are fp32 and the same on all ranks.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the last forward had no backward, which would have done this
    trained = torch.nn.ParameterList(
        parameter for parameter in model.parameters() if parameter.requires_grad
    )
    for parameter in trained:
        assert parameter.dtype == torch.float32
        for value in optimizer.state[parameter].values():
            assert value.dtype == torch.float32
    runtime.print0(
        f"checked: {len(trained)} trained weights and their optimizer state kept in {torch.float32}"
    )
    digests = runtime.all_gather(digest(trained))
    assert len(set(digests)) == 1, f"ranks hold different weights: {digests}"
    if world_size > 1:
        runtime.print0(f"checked: all {world_size} ranks have the same trained weights to the bit")

    # 7. Write the folders for other programs, and the summary.
    # For --json alone.
    details = {"weights_sha256": digests[0], **bytes_per_rank, **padding}
    details["best_step"] = best.step if best else None
    if step == args.steps:  # also if a signal came in the last step
        save_dtype = runtime.DTYPES[args.save_dtype]
        _finetune.write_folders(model, chat, run.folder, args, save_dtype, mark)
        compare = partial(
            _finetune.compare_with_transformers,
            run.folder / "model",
            config,
            prompts[0],
            device,
        )
        details["transformers_error"] = runtime.on_rank0(compare)
        details["answers"] = _finetune.print_answers(chat, prompts, answers_before, answers)
    meter.finish(
        step,
        model=args.model,
        parameters=shapes.parameter_count(config),
        json_path=args.json,
        details=details,
        val_loss_before=val_loss_before,
        **losses,
    )
    runtime.shutdown()
    return exits.REQUEUE_EXIT_CODE if stop and step < args.steps else 0


@torch.no_grad()
def evaluate(model, batches, device, unpack) -> float:
    """Return the mean loss per target over at most EVAL_SEQUENCES held-out rows, of all ranks."""
    model.eval()
    loss_sum = torch.zeros((), device=device)
    target_count = torch.zeros((), device=device)
    for inputs, targets in batches:
        targets = targets.to(device)
        # Ranks with fewer rows have rows without targets, for as many forwards. They are padding.
        is_empty = (targets == PADDING).all(dim=1, keepdim=True)
        inputs, masks = unpack(inputs.to(device).masked_fill(is_empty, PADDING))
        loss_sum += model(inputs, targets, reduction="sum", **masks)
        target_count += (targets != PADDING).sum()
    dist.all_reduce(loss_sum)
    dist.all_reduce(target_count)
    model.train()
    return (loss_sum / target_count).item()


if __name__ == "__main__":
    exits.run(main)
