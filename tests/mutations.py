"""Can the tests fail? Plant a fault in a copy of the repository, and see whether the test that is meant for it does.

    python tests/mutations.py                     all of them, two at a time
    python tests/mutations.py --only clip --jobs 1
    python tests/mutations.py --list

A fault replaces lines that must stand exactly once in their file. First all named tests must pass on the copy as it
is; then, fault by fault, the named test must fail. Exit code 1 and the word SURVIVED if one does not.
"""

import ast
import contextlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from support.harness import ROOT, clean_env

from common import cli, exits, report

AMP, DDP, FSDP = "04_amp/train.py", "05_ddp/train.py", "06_fsdp_zero/train_fsdp.py"
CHECKPOINT, DATA, MODEL = "common/checkpoint.py", "common/data.py", "common/model.py"
METRICS, RUN_DIR, RUNTIME = "common/metrics.py", "common/run_dir.py", "common/runtime.py"
LORA, LORA_TESTS = "07_memory_tricks/lora.py", "tests/test_07_lora.py::test_"
CHUNKED, OPTIMIZERS = "07_memory_tricks/chunked_loss.py", "07_memory_tricks/optimizer_memory.py"
ACCUMULATE = "07_memory_tricks/gradient_accumulation.py"
CHECKPOINTING, ACCUMULATION = "tests/test_07_checkpointing.py::test_", "tests/test_07_accumulation.py::test_"
ZERO, ZERO_SAVES = "06_fsdp_zero/train_zero.py", "06_fsdp_zero/_train_zero_checkpoint.py"
CONVERT, FROM_DEEPSPEED = "06_fsdp_zero/convert_checkpoint.py", "06_fsdp_zero/_convert_checkpoint_deepspeed.py"
COMPARE, COUNT = "06_fsdp_zero/compare.py", "06_fsdp_zero/_compare_count.py"
MUON = "06_fsdp_zero/muon.py"
WITH_ZERO, CONVERSION = "tests/test_06_train_zero.py::test_", "tests/test_06_convert.py::test_"
COMPARISON, WITH_MUON = "tests/test_06_compare.py::test_", "tests/test_06_muon.py::test_"
BIG, BIG_TESTS = "07_memory_tricks/train_big.py", "tests/test_07_train_big.py::test_"
EQUIVALENCE, FAULTS = "tests/test_equivalence.py::test_", "tests/test_faults.py::test_"
SHARDING = "tests/test_06_fsdp.py::test_"
ESTIMATE = "tests/test_07_estimate.py::test_"
STAGES, ZERO3 = "06_fsdp_zero/_infer_70b_pipeline.py", "06_fsdp_zero/_infer_70b_zero3.py"
WITH_STAGES = "tests/test_06_infer_stages.py::test_"
KV_CACHE, KV_CACHE_TESTS = "07_memory_tricks/kv_cache.py", "tests/test_07_kv_cache.py::test_"
GENERATE, INFERENCE, GENERATION = "common/generate.py", "common/inference.py", "tests/test_generate.py::test_"
QUANTIZE_MODEL, QUANTIZATION = "02_tensors_precision/_quantize_model.py", "tests/test_02_quantize.py::test_"
BENCHMARKS = "tests/test_benchmarks.py::test_"
QUANTIZED_PRODUCTS = "07_memory_tricks/_quantized_inference_products.py"
QUANTIZED_GUESSES = "07_memory_tricks/_quantized_inference_speculative.py"
QUANTIZED_TESTS = "tests/test_07_quantized_inference.py::test_"
TENSOR, TENSOR_TESTS = "08_model_parallel/tensor_parallel.py", "tests/test_08_tensor_parallel.py::test_"
PIPELINE, REPLAY = "08_model_parallel/pipeline_parallel.py", "08_model_parallel/_pipeline_parallel_replay.py"
PIPELINE_TESTS = "tests/test_08_pipeline_parallel.py::test_"
CONTEXT, CONTEXT_TESTS = "08_model_parallel/context_parallel.py", "tests/test_08_context_parallel.py::test_"
EXPERTS, EXPERT_TESTS = "08_model_parallel/expert_parallel.py", "tests/test_08_expert_parallel.py::test_"
COPIED = ("[0-9]*", "common", "tests", "benchmarks", "launch", "Makefile", "pyproject.toml", "*.md")
SECONDS_PER_TEST = 240  # as a test's own limit; a fault may turn a run into a hang
TESTS_FAILED = 1  # pytest's exit status


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    line: str  # or lines, as they stand
    fault: str  # what stands there instead
    test: str

    def apply(self, folder: Path) -> None:
        """Plant the fault in a copy of the repository. ValueError if the line is not there exactly once."""
        file = folder / self.file
        text = file.read_text()
        if text.count(self.line) != 1:
            raise ValueError(f"{self.name}: stands {text.count(self.line)} times in {self.file}: {self.line!r}")
        mutated = text.replace(self.line, self.fault)
        ast.parse(mutated)  # a fault that does not compile proves nothing
        file.write_text(mutated)


MUTATIONS = [
    # --- first the one that takes longest: its test waits for a hang
    Mutation(
        "the last to hold a gloo group is DDP",
        RUNTIME,
        "    _left_groups.append(dist.group.WORLD)\n",
        "",
        "tests/test_05_ddp.py::test_no_rank_hangs_after_its_last_line",
    ),
    # --- resuming
    Mutation(
        "random states are not restored",
        CHECKPOINT,
        "        restore.get(name, torch.cuda.set_rng_state)(state)\n",
        "        restore.get(name, torch.cuda.set_rng_state)\n",
        EQUIVALENCE + "what_is_drawn_at_random_goes_on_where_it_was[1-False]",
    ),
    Mutation(
        "the optimizer's state is not restored",
        CHECKPOINT,
        '    scheduler.load_state_dict(state["scheduler"])\n',
        '    scheduler.load_state_dict(state["scheduler"])\n    optimizer.state.clear()\n',
        EQUIVALENCE + "resumed_is_uninterrupted_to_the_bit[04_amp/train.py-None-8]",
    ),
    Mutation(
        "the schedule is not restored",
        CHECKPOINT,
        '    scheduler.load_state_dict(state["scheduler"])\n',
        "",
        EQUIVALENCE + "resumed_is_uninterrupted_to_the_bit[04_amp/train.py-None-8]",
    ),
    Mutation(
        "the loss scale is not restored",
        CHECKPOINT,
        '    scaler.load_state_dict(state["scaler"])\n',
        "",
        EQUIVALENCE + "fp16_scaler_and_accumulation_resume_to_the_bit[04_amp/train.py]",
    ),
    Mutation(
        "a resume starts the data again",
        DDP,
        "        start_step=start_step,\n        rank=rank,\n",
        "        start_step=0,\n        rank=rank,\n",
        EQUIVALENCE + "resumed_is_uninterrupted_to_the_bit[05_ddp/train.py-2-8]",
    ),
    Mutation(
        "steps done again are recorded twice",
        METRICS,
        'if record["step"] <= self.start_step]',
        "]",
        EQUIVALENCE + "resumed_is_uninterrupted_to_the_bit[04_amp/train.py-None-8]",
    ),
    Mutation(
        "a resume takes other settings",
        RUN_DIR,
        "    if differ:\n",
        "    if False:\n",
        FAULTS + "a_folder_with_another_runs_settings[05_ddp/train.py]",
    ),
    # --- saving
    Mutation(
        "a checkpoint is written in place",
        CHECKPOINT,
        '        temporary = final.with_suffix(".tmp")\n',
        "        temporary = final\n",
        FAULTS + "a_file_that_cannot_be_written_leaves_the_previous_checkpoint[sync-05_ddp/train.py]",
    ),
    Mutation(
        "hashes are not compared",
        CHECKPOINT,
        "            if _sha256(path / name) != hashes[name]:\n",
        "            if not (path / name).exists():\n",
        FAULTS + "a_damaged_checkpoint_is_passed_over[one bit-05_ddp/train.py]",
    ),
    Mutation(
        "the newest checkpoints are deleted, not the oldest",
        CHECKPOINT,
        "self._found()[: -self.keep]:\n",
        "self._found()[self.keep :]:\n",
        EQUIVALENCE + "keep_prunes_the_oldest[04_amp/train.py]",
    ),
    Mutation(
        "a save in the background writes what has changed since",
        CHECKPOINT,
        "self._write, step, _cpu_copy(state), write)",
        "self._write, step, state, write)",
        EQUIVALENCE + "training_goes_on_while_a_save_is_written",
    ),
    Mutation(
        "the lock is not taken",
        RUN_DIR,
        "        _locks[-1].acquire(timeout=int(seconds))\n",
        "",
        FAULTS + "a_folder_in_use_by_a_live_run[05_ddp/train.py]",
    ),
    Mutation(
        "the digest leaves out a parameter",
        CHECKPOINT,
        "    for parameter in net.parameters():\n",
        "    for parameter in list(net.parameters())[:-1]:\n",
        "tests/test_model.py::test_digest_sees_one_bit",
    ),
    # --- a step
    Mutation(
        "gradients are clipped scaled (05)",
        DDP,
        "        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients\n",
        "",
        EQUIVALENCE + "the_fp16_clip_equals_the_fp32_clip[05_ddp/train.py]",
    ),
    Mutation(
        "gradients are clipped before they are unscaled (04)",
        AMP,
        "        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients\n"
        "        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)\n",
        "        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)\n        scaler.unscale_(optimizer)\n",
        EQUIVALENCE + "the_fp16_clip_equals_the_fp32_clip[04_amp/train.py]",
    ),
    Mutation(
        "gradients are not clipped",
        DDP,
        "clip_grad_norm_(net.parameters(), args.clip_norm)",
        "clip_grad_norm_(net.parameters(), math.inf)",
        EQUIVALENCE + "the_fp16_clip_equals_the_fp32_clip[05_ddp/train.py]",
    ),
    Mutation(
        "micro-batches are summed, not averaged",
        DDP,
        "ddp(inputs, targets) / accumulation_steps",
        "ddp(inputs, targets)",
        EQUIVALENCE + "micro_batches_equal_one_batch[05_ddp/train.py-2-2]",
    ),
    Mutation(
        "gradients are never averaged over the ranks",
        DDP,
        "sync = nullcontext() if micro_step == accumulation_steps else ddp.no_sync()",
        "sync = ddp.no_sync()",
        EQUIVALENCE + "micro_batches_equal_one_batch[05_ddp/train.py-2-2]",
    ),
    Mutation(
        "gradients are not set to zero",
        AMP,
        "        optimizer.zero_grad(set_to_none=True)\n",
        "",
        EQUIVALENCE + "one_process_equals_the_baseline_to_the_bit[05_ddp/train.py-None]",
    ),
    Mutation(
        "weights are kept in bf16",
        AMP,
        "    net = model.build(args.model, config, seed=args.seed, device=device)\n",
        "    net = model.build(args.model, config, seed=args.seed, device=device).to(DTYPES[args.dtype])\n",
        "tests/test_04_amp.py::test_small_updates_are_kept_in_bf16",
    ),
    Mutation(
        "norms are decayed",
        AMP,
        '{"params": vectors, "weight_decay": 0.0}',
        '{"params": vectors, "weight_decay": args.weight_decay}',
        EQUIVALENCE + "weight_decay_is_for_matrices_alone[04_amp/train.py]",
    ),
    Mutation(
        "the warm-up begins at zero",
        AMP,
        "        return (step + 1) / warmup_steps\n",
        "        return step / warmup_steps\n",
        "tests/test_04_amp.py::test_warmup_then_cosine",
    ),
    Mutation(
        "a skipped step moves the schedule",
        AMP,
        '            progress["skipped_steps"] += 1\n        else:\n            scheduler.step()\n',
        '            progress["skipped_steps"] += 1\n        scheduler.step()\n',
        EQUIVALENCE + "fp16_scaler_and_accumulation_resume_to_the_bit[04_amp/train.py]",
    ),
    # --- what is told
    Mutation(
        "the logged loss is that of the last micro-batch",
        DDP,
        "            step_loss += loss.detach()\n",
        "            step_loss = loss.detach()\n",
        "tests/test_05_ddp.py::test_the_logged_loss_is_the_mean_over_ranks_and_micro_batches",
    ),
    Mutation(
        "the logged loss is that of rank 0",
        DDP,
        "            dist.all_reduce(noted)\n",
        "            noted *= world_size\n",
        "tests/test_05_ddp.py::test_the_logged_loss_is_the_mean_over_ranks_and_micro_batches",
    ),
    Mutation(
        "the evaluation is that of rank 0",
        DDP,
        "    dist.all_reduce(total)  # sums, not means: a rank may have read fewer tokens than the others\n",
        "",
        EQUIVALENCE + "every_script_on_any_number_of_processes_gives_the_same_losses_and_gradients[05_ddp/train.py-2]",
    ),
    Mutation(
        "the evaluation counts padding",
        DDP,
        "        tokens = (targets != data.PADDING).sum()\n",
        "        tokens = torch.tensor(targets.numel(), device=device)\n",
        EQUIVALENCE + "every_script_on_any_number_of_processes_gives_the_same_losses_and_gradients[05_ddp/train.py-3]",
    ),
    Mutation(
        "the evaluation is in train mode",
        DDP,
        "    net.eval()\n",
        "",
        EQUIVALENCE + "evaluation_switches_dropout_off_and_on_again[05_ddp/train.py]",
    ),
    Mutation(
        "training goes on in eval mode",
        AMP,
        "    net.train()\n",
        "",
        EQUIVALENCE + "evaluation_switches_dropout_off_and_on_again[04_amp/train.py]",
    ),
    Mutation(
        "MFU is against the peak of fp32",
        METRICS,
        "        self.peak_flops = peak_flops(device_name(device), dtype)\n",
        '        self.peak_flops = peak_flops(device_name(device), "fp32")\n',
        "tests/test_05_ddp.py::test_mfu_is_against_the_peak_of_this_device_in_this_dtype",
    ),
    Mutation(
        "MFU is against the peak of one device",
        METRICS,
        "(self.peak_flops * self.devices)",
        "self.peak_flops",
        "tests/test_05_ddp.py::test_mfu_is_against_the_peak_of_all_devices",
    ),
    Mutation(
        "a loss that is not finite is passed over",
        METRICS,
        "        if not all(finite):\n",
        "        if False:\n",
        FAULTS + "a_loss_that_is_not_finite_names_the_step",
    ),
    # --- data
    Mutation(
        "every epoch has the same order",
        DATA,
        "np.random.default_rng([seed, epoch])",
        "np.random.default_rng([seed])",
        "tests/test_data.py::test_each_sequence_once_per_epoch_in_a_new_permutation",
    ),
    Mutation(
        "all ranks read the same part",
        DATA,
        "        first = step * global_batch_size + rank * share\n",
        "        first = step * global_batch_size\n",
        "tests/test_data.py::test_ranks_never_overlap",
    ),
    Mutation(
        "what is held out is trained on",
        DATA,
        "    train = [d for d, h in zip(documents, hashes, strict=True) if h not in held_out]\n",
        "    train = documents\n",
        "tests/test_data.py::test_a_copy_of_a_held_out_document_is_held_out_too",
    ),
    Mutation(
        "targets are the tokens themselves",
        DATA,
        "torch.from_numpy(window[1:])",
        "torch.from_numpy(window[:-1])",
        "tests/test_data.py::test_targets_are_the_next_tokens",
    ),
    # --- the model
    Mutation(
        "attention looks ahead",
        MODEL,
        "is_causal=seen is None",
        "is_causal=False",
        "tests/test_model.py::test_attention_is_causal",
    ),
    Mutation(
        "keys are rotated by the position before theirs",
        MODEL,
        "rotate(k, cos, sin)",
        "rotate(k, cos.roll(1, 0), sin.roll(1, 0))",
        "tests/test_model.py::test_logits_equal_those_of_transformers",
    ),
    Mutation(
        "query heads take turns at the key-value heads",
        MODEL,
        "        y = self.attend(q, k, v,",
        "        k, v = (part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in (k, v))\n"
        "        y = self.attend(q, k, v,",
        "tests/test_model.py::test_logits_equal_those_of_transformers",
    ),
    Mutation(
        "a rank whose torchrun is gone trains on alone",
        DDP,
        "world_size > 1 or dist.is_torchelastic_launched()",
        "world_size > 1",
        FAULTS + "a_rank_without_its_torchrun_does_not_train[05_ddp/train.py]",
    ),
    Mutation(
        "a terminal that closes takes the last steps with it",
        RUNTIME,
        "signal.signal(signal.SIGHUP, note)",
        "pass",
        FAULTS + "a_terminal_that_closes_saves_too[nohup-05_ddp/train.py]",
    ),
    Mutation(
        "checkpoints of an unknown run are gone on with",
        RUN_DIR,
        "        if not known and any(run_dir.glob(CHECKPOINTS)):",
        "        if False:",
        "tests/test_checkpoint.py::test_checkpoints_without_their_settings_are_refused",
    ),
    Mutation(
        "a gradient norm on the CPU meets a loss on the GPU",
        METRICS,
        ".to(loss.device)",
        "",
        "tests/test_05_ddp.py::test_a_gradient_norm_may_be_on_another_device_than_the_loss",
    ),
    Mutation(
        "attention with a mask and grouped heads holds all scores on a GPU",
        MODEL,
        "    if seen is None or not enable_gqa:",
        "    if True:",
        "tests/test_model.py::test_no_kernel_gets_a_mask_with_grouped_heads_nor_copies_of_keys",
    ),
    Mutation(
        "with grouped heads, a sequence gets the mask of another",
        MODEL,
        "seen.repeat_interleave(kv_heads, 0)",
        "seen.repeat(kv_heads, 1, 1, 1)",
        "tests/test_model.py::test_attention_with_a_mask_and_grouped_heads_is_torchs",
    ),
    Mutation(
        "all matrices start from one generator's state",
        MODEL,
        'hashlib.sha256(f"{seed} {name}".encode())',
        'hashlib.sha256(f"{seed}".encode())',
        "tests/test_sharding.py::test_weights_are_a_function_of_seed_and_name",
    ),
    Mutation(
        "the RoPE tables of a model from the meta device are unset",
        MODEL,
        "        super()._apply(fn, recurse)\n        self._fill_rope_tables()",
        "        super()._apply(fn, recurse)\n        None",
        "tests/test_sharding.py::test_a_model_from_the_meta_device_has_nothing_unset",
    ),
    # --- how a script ends
    Mutation(
        "a wrong flag ends with exit code 1",
        "common/exits.py",
        "            leave(2)\n",
        "            leave(1)\n",
        FAULTS + "bad_input[04_amp/train.py-model]",
    ),
    Mutation(
        "too little memory ends in a traceback",
        "common/exits.py",
        "        elif is_out_of_memory(error):\n",
        "        elif False:\n",
        "tests/test_07_memory_profile.py::test_a_model_that_does_not_fit_ends_in_one_line",
    ),
    # --- memory tricks
    Mutation(
        "memory that is freed counts on (memory_profile)",
        "07_memory_tricks/memory_profile.py",
        "        piece.freed = len(self.live_bytes)\n",
        "        piece.freed = None\n",
        "tests/test_07_memory_profile.py::test_categories_are_those_of_independent_counts[untied-fp32]",
    ),
    Mutation(
        "a cast weight counts as an activation (memory_profile)",
        "07_memory_tricks/memory_profile.py",
        'self.mark(tensor, "weight copies" if is_of_a_weight(tensor) else "activations")',
        'self.mark(tensor, "activations")',
        "tests/test_07_memory_profile.py::test_categories_are_those_of_independent_counts[untied-bf16]",
    ),
    Mutation(
        "what a module made is said to be its parent's (memory_profile)",
        "07_memory_tricks/memory_profile.py",
        "Piece(storage.nbytes(), self.running[-1], born=len(self.live_bytes))",
        "Piece(storage.nbytes(), self.running[max(0, len(self.running) - 2)], born=len(self.live_bytes))",
        "tests/test_07_memory_profile.py::test_modules_hold_what_the_categories_hold",
    ),
    Mutation(
        "weights leave with the activations (offload)",
        "07_memory_tricks/offload.py",
        "if storage.nbytes() < SMALLEST_BYTES or storage.data_ptr() in self.stays:",
        "if storage.nbytes() < SMALLEST_BYTES:",
        "tests/test_07_offload.py::test_each_piece_leaves_once_and_weights_stay[fp32]",
    ),
    Mutation(
        "a tensor that was written over comes back as it was (offload)",
        "07_memory_tricks/offload.py",
        "        if kept is None or kept.version != tensor._version:\n",
        "        if kept is None:\n",
        "tests/test_07_offload.py::test_what_is_written_over_is_another_piece",
    ),
    Mutation(
        "backward asks for a piece when it needs it (offload)",
        "07_memory_tricks/offload.py",
        "        first = max(0, kept.position - MOST_AHEAD)\n",
        "        first = kept.position\n",
        "tests/test_07_offload.py::test_backward_asks_ahead",
    ),
    Mutation(
        "updated moments do not leave (offload)",
        "07_memory_tricks/_offload_optimizer.py",
        "            level.write(slot, bytes_of(moment))\n",
        "            None\n",
        "tests/test_07_offload.py::test_streamed_updates_equal_those_of_one_optimizer[untied]",
    ),
    # --- sharding
    Mutation(
        "gradients are clipped scaled (06)",
        FSDP,
        "        scaler.unscale_(optimizer)  # before clipping: the threshold is meant for true gradients\n",
        "",
        EQUIVALENCE + "the_fp16_clip_equals_the_fp32_clip[06_fsdp_zero/train_fsdp.py]",
    ),
    Mutation(
        "each rank clips by the norm of its own rows",
        FSDP,
        "        grad_norm = clip_grad_norm_(net.parameters(), args.clip_norm)\n",
        "        grad_norm = torch.nn.utils.get_total_norm([p.grad.to_local() for p in net.parameters()])\n"
        "        torch.nn.utils.clip_grads_with_norm_(net.parameters(), args.clip_norm, grad_norm)\n",
        SHARDING + "sharded_over_four_ranks_is_one_process[sharded]",
    ),
    Mutation(
        "blocks stay whole after forward",
        FSDP,
        'reshard_after_forward=None if args.reshard_after_forward == "on" else False',
        "reshard_after_forward=False",
        SHARDING + "sharded_over_four_ranks_is_one_process[sharded]",
    ),
    Mutation(
        "the angles of RoPE are rounded with the weights",
        FSDP,
        "cast_forward_inputs=False",
        "cast_forward_inputs=True",
        SHARDING + "bf16_rounds_what_is_multiplied_and_not_the_angles",
    ),
    Mutation(
        "each rank draws the weights of its rows from a seed of its own",
        FSDP,
        "model.materialize(net, args.model, seed=args.seed,",
        "model.materialize(net, args.model, seed=args.seed + rank,",
        SHARDING + "sharded_over_four_ranks_is_one_process[sharded]",
    ),
    # --- will it fit
    Mutation(
        "the estimator counts keys and values for every query head",
        "07_memory_tricks/estimate.py",
        "    k = ranks * (shape.q_width if own_heads else shape.kv_width)\n",
        "    k = ranks * shape.q_width\n",
        ESTIMATE + "activations_are_what_autograd_saves",
    ),
    Mutation(
        "the estimator forgets that a cache has keys and values",
        "07_memory_tricks/estimate.py",
        "    return 2 * shape.layers * shape.kv_width * bytes_each",
        "    return shape.layers * shape.kv_width * bytes_each",
        ESTIMATE + "published_figures_hold_within_their_tolerance",
    ),
    Mutation(
        "the estimator divides optimizer state by the tensor-parallel ranks once more",
        "07_memory_tricks/_estimate_plan.py",
        "        return self.dp * self.cp\n",
        "        return self.gpus\n",
        ESTIMATE + "measured_peaks",
    ),
    Mutation(
        "advice ignores what the network and the driver take",
        "07_memory_tricks/_estimate_advise.py",
        '        if lines["total_bytes"] <= device.memory_bytes:\n',
        '        if lines["weight_bytes"] <= device.memory_bytes:\n',
        ESTIMATE + "advice_fits_and_is_ranked",
    ),
    # --- adapters
    Mutation(
        "adapters count once, whatever alpha and rank",
        LORA,
        "        return self.base(x) + self.lora_B(self.lora_A(x)) * self.scaling\n",
        "        return self.base(x) + self.lora_B(self.lora_A(x))\n",
        LORA_TESTS + "merged_equals_unmerged",
    ),
    Mutation(
        "adapters: autograd keeps the dequantized weights",
        LORA,
        "        return Int4Product.apply(x, self.int4(), (self.out_features, self.in_features))\n",
        "        return F.linear(x, self.weight.to(x.dtype))\n",
        LORA_TESTS + "no_dequantized_weight_waits_for_backward",
    ),
    Mutation(
        "adapters: the two codes of a byte are swapped",
        LORA,
        "torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1)",
        "torch.stack((weight.codes >> 4, weight.codes & 15), dim=-1)",
        LORA_TESTS + "int4_is_what_numpy_rounds_to",
    ),
    Mutation(
        "adapters: what is frozen is trained as well",
        LORA,
        "    net.requires_grad_(False).to(dtype)  # embedding, norms and head as well\n",
        "    net.to(dtype)\n",
        LORA_TESTS + "adapters_alone_are_trained",
    ),
    Mutation(
        "adapters: the question counts in the loss",
        "07_memory_tricks/_lora_tasks.py",
        "        targets[row, prompt_length - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt_length:])\n",
        "        targets[row, : len(tokens) - 1] = torch.tensor(tokens[1:])\n",
        LORA_TESTS + "the_loss_is_of_the_answer_alone",
    ),
    Mutation(
        "adapters: a frozen weight is counted as an activation",
        "common/step_cost.py",
        "        for kind in (saved.weight_copies, saved.activations):\n",
        "        for kind in (saved.weight_copies,):\n",
        LORA_TESTS + "a_frozen_weight_is_no_activation",
    ),
    Mutation(
        "a replay trains on the batch of the capture (cuda_graphs)",
        "07_memory_tricks/cuda_graphs.py",
        "        static.copy_(tensor)\n",
        "        None\n",
        "tests/test_07_cuda_graphs.py::test_a_replay_is_given_its_batch_and_keeps_its_loss",
    ),
    Mutation(
        "the next replay writes over the loss (cuda_graphs)",
        "07_memory_tricks/cuda_graphs.py",
        "    return loss.clone()",
        "    return loss",
        "tests/test_07_cuda_graphs.py::test_a_replay_is_given_its_batch_and_keeps_its_loss",
    ),
    Mutation(
        "the tiny model is one layer deep (cuda_graphs)",
        "07_memory_tricks/cuda_graphs.py",
        "        intermediate_size=2,\n",
        "        intermediate_size=2,\n        num_hidden_layers=1,\n",
        "tests/test_07_cuda_graphs.py::test_the_tiny_model_runs_the_same_operators[untied-fp32]",
    ),
    Mutation(
        "the estimator forgets that a tied matrix has two gradients",
        "07_memory_tricks/_estimate_peak.py",
        " + root_reduced + tied_gradients,\n",
        " + root_reduced,\n",
        ESTIMATE + "the_peak_is_that_of_a_step",
    ),
    Mutation(
        "the estimator counts what a block has kept as if it were computed again",
        "07_memory_tricks/_estimate_peak.py",
        "    of_last_block = feed_forward.activations - kept_of_block - kept_of_end\n",
        "    of_last_block = feed_forward.activations - kept_of_end\n",
        ESTIMATE + "the_peak_is_that_of_a_step",
    ),
    Mutation(
        "the estimator forgets autocast's copies of a block's weights",
        "07_memory_tricks/_estimate_peak.py",
        "part.activations + part.casts - ",
        "part.activations - ",
        ESTIMATE + "the_peak_is_that_of_a_step",
    ),
    Mutation(
        "the estimator forgets logits that a variable holds through backward",
        "07_memory_tricks/_estimate_peak.py",
        "nearly_all + held + gathered_by_backward",
        "nearly_all + gathered_by_backward",
        ESTIMATE + "the_peak_is_that_of_a_step",
    ),
    Mutation(
        "a torchtitan whose checkpointing computed attention again is thought to keep it",
        "07_memory_tricks/_estimate_planner_cases.py",
        "    return -shape_of(row).value_width if is_of(row, ATTENTION_NOT_KEPT) else 0\n",
        "    return 0\n",
        ESTIMATE + "measured_peaks",
    ),
    Mutation(
        "tensor ranks are thought to keep only their part of a sum",
        "07_memory_tricks/_estimate_frameworks.py",
        "        whole_in_pipelines=True,\n        whole_summands=True,\n",
        "        whole_in_pipelines=True,\n",
        "tests/test_08_plan.py::test_bytes_of_ranks_are_as_predicted[tensor, kept and repeated]",
    ),
    # --- the loss in chunks
    Mutation(
        "padding counts in the head's gradient of the chunked loss",
        CHUNKED,
        "            add_product(head_gradient, logits_gradient.T, hidden * counted)\n",
        "            add_product(head_gradient, logits_gradient.T, hidden)\n",
        "tests/test_07_chunked_loss.py::test_chunks_equal_the_whole[7-11-5-3]",
    ),
    Mutation(
        "the chunked loss is the mean over padding too",
        CHUNKED,
        "        count = (targets != PADDING).sum()\n",
        "        count = torch.tensor(len(targets))\n",
        "tests/test_07_chunked_loss.py::test_chunks_equal_the_whole[64-257-33-16]",
    ),
    Mutation(
        "what follows the chunked loss does not scale its gradients",
        CHUNKED,
        "        factor = loss_gradient / count.clamp(min=1)",
        "        factor = 1 / count.clamp(min=1)",
        "tests/test_07_chunked_loss.py::test_micro_batches_add_up",
    ),
    Mutation(
        "an evaluation of the chunked loss computes gradients",
        CHUNKED,
        "    if not torch.is_grad_enabled():",
        "    if False:",
        "tests/test_07_chunked_loss.py::test_an_evaluation_computes_no_gradient",
    ),
    # --- optimizer state in fewer bytes
    Mutation(
        "stochastic rounding rounds down too often",
        OPTIMIZERS,
        "torch.randint(1 << 16, x.shape",
        "torch.randint(1 << 15, x.shape",
        "tests/test_07_optimizer_memory.py::test_stochastic_rounding_is_unbiased",
    ),
    Mutation(
        "codes are those of the value below, not of the nearest",
        OPTIMIZERS,
        "    between = (book[1:] + book[:-1]) / 2\n",
        "    between = book[1:]\n",
        "tests/test_07_optimizer_memory.py::test_a_round_trip_is_off_by_half_a_gap_at_most[first-shape2]",
    ),
    Mutation(
        "second moments may become zero",
        OPTIMIZERS,
        "    values = [1.0, 0.0] if signed else [1.0]\n",
        "    values = [1.0, 0.0]\n",
        "tests/test_07_optimizer_memory.py::test_the_code_books",
    ),
    Mutation(
        "8-bit codes are loaded as torch casts them",
        OPTIMIZERS,
        "                    self.state[parameter][name] = kept\n",
        "                    del kept\n",
        "tests/test_07_optimizer_memory.py::test_a_resumed_state_goes_on_to_the_bit[dtype0-8bit]",
    ),
    Mutation(
        "a gradient outlives its step inside backward",
        OPTIMIZERS,
        "            optimizer.zero_grad()  # the gradient's memory is free for the next one\n",
        "",
        "tests/test_07_optimizer_memory.py::test_a_step_inside_backward_is_the_step_after_it_to_the_bit",
    ),
    Mutation(
        "tensors whose optimizer steps inside backward are rounded by the same draws",
        OPTIMIZERS,
        'start=group["number"]):\n',
        "start=0):\n",
        "tests/test_07_optimizer_memory.py::test_a_step_inside_backward_is_the_step_after_it_to_the_bit[bf16]",
    ),
    # --- memory tricks
    Mutation(
        "05 ignores --checkpointing",
        DDP,
        "    model.checkpoint_blocks(net, args.checkpointing)",
        "    model.checkpoint_blocks(net, 'none')",
        EQUIVALENCE + "what_backward_computes_again_is_what_forward_computed_to_the_bit[05_ddp/train.py-2-full]",
    ),
    Mutation(
        "selective keeps what nothing reads",
        MODEL,
        "kept = products[context.is_recompute] < products_in_block",
        "kept = products[context.is_recompute] <= products_in_block",
        CHECKPOINTING + "the_memory_that_nano_saves[8]",
    ),
    Mutation(
        "selective computes a product again",
        MODEL,
        "kept = products[context.is_recompute] < products_in_block",
        "kept = products[context.is_recompute] < products_in_block - 1",
        CHECKPOINTING + "the_training_scripts_keep_what_the_script_shows[tied, wide]",
    ),
    Mutation(
        "every second block, from the first on",
        "07_memory_tricks/gradient_checkpointing.py",
        "enumerate(blocks, start=1)]",
        "enumerate(blocks)]",
        CHECKPOINTING + "each_variant_recomputes_what_it_should",
    ),
    Mutation(
        "by hand, bf16 is forgotten in backward",
        "07_memory_tricks/gradient_checkpointing.py",
        "torch.bfloat16, enabled=context.autocast)",
        "torch.bfloat16, enabled=False)",
        CHECKPOINTING + "under_autocast_the_block_by_hand_multiplies_in_bf16_again",
    ),
    Mutation(
        "micro-batches are weighted by the tokens of their rank",
        ACCUMULATE,
        "    dist.all_reduce(tokens_of_all_ranks)\n",
        "",
        ACCUMULATION + "micro_batches_are_one_batch_of_all_ranks[2]",
    ),
    Mutation(
        "every micro-batch averages over the ranks",
        ACCUMULATE,
        "        sync = nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync()\n",
        "        sync = nullcontext()\n",
        ACCUMULATION + "micro_batches_are_one_batch_of_all_ranks[None]",
    ),
    Mutation(
        "the last group of an epoch is dropped",
        ACCUMULATE,
        "    if group:\n        yield group\n",
        "",
        ACCUMULATION + "no_micro_batch_is_lost[7]",
    ),
    # --- DeepSpeed
    Mutation(
        "ZeRO: the loss is divided by the accumulation steps twice",
        ZERO,
        "        engine.backward(loss)  #",
        "        engine.backward(loss / engine.gradient_accumulation_steps())  #",
        WITH_ZERO + "each_stage_is_data_parallelism[2]",
    ),
    Mutation(
        "ZeRO: the logged loss is that of rank 0",
        ZERO,
        "            dist.all_reduce(noted)\n",
        "            noted *= world_size\n",
        WITH_ZERO + "each_stage_is_data_parallelism[2]",
    ),
    Mutation(
        "ZeRO: stage 3 does not read the weights of --model FOLDER",
        ZERO,
        "        model.set_weights(net, args.model, seed=args.seed)",
        '        model.set_weights(net, "nano", seed=args.seed)',
        WITH_ZERO + "stage_3_starts_from_the_weights_of_one_process_to_the_bit[True]",
    ),
    Mutation(
        "ZeRO: the files of a step have no hashes",
        ZERO_SAVES,
        "        yield folder / name\n",
        "        yield from ()\n",
        WITH_ZERO + "a_damaged_checkpoint_is_named_and_the_one_before_taken[one bit]",
    ),
    Mutation(
        "ZeRO: all groups count one step counter up",
        ZERO_SAVES,
        'state["step"] = state["step"].clone()',
        'state["step"] = state["step"]',
        WITH_ZERO + "a_run_moves_between_numbers_of_ranks[3]",
    ),
    Mutation(
        "ZeRO: random states are not restored",
        ZERO_SAVES,
        "        checkpoint.restore_random_states(torch.load(own, weights_only=False))\n",
        "        torch.load(own, weights_only=False)\n",
        WITH_ZERO + "what_is_drawn_at_random_goes_on_where_it_was",
    ),
    Mutation(
        "ZeRO: files take parts of any size",
        "06_fsdp_zero/_train_zero_nvme.py",
        "        if parameter.ndim == 2 and part % ALIGNED_TO:\n",
        "        if False:\n",
        WITH_ZERO + "files_that_cannot_be_are_told_in_one_line[alignment]",
    ),
    # --- conversion
    Mutation(
        "conversion: the rows of the second rank are shifted",
        FROM_DEEPSPEED,
        "        start -= len(part)\n",
        "        start -= len(part) + 1\n",
        CONVERSION + "what_deepspeed_has_saved_becomes_a_folder[2-True-3]",
    ),
    Mutation(
        "conversion: ranks are taken in the order of their files' names",
        FROM_DEEPSPEED,
        'sorted(folder.glob("*_optim_states.pt"), key=rank_of)',
        'sorted(folder.glob("*_optim_states.pt"))',
        CONVERSION + "eleven_ranks_are_read_in_their_order",
    ),
    Mutation(
        "conversion: a tied head is written beside the embedding",
        CONVERT,
        "for name, tensor in source.tensors.items() if not (tied and name == HEAD)}",
        "for name, tensor in source.tensors.items()}",
        CONVERSION + "a_run_becomes_a_folder_that_transformers_computes_alike[True]",
    ),
    Mutation(
        "conversion: what was written is not compared with what was read",
        CONVERT,
        "            assert sha256(written.read(name)) == expected, ",
        "            assert written.read(name) is not None, ",
        CONVERSION + "what_was_written_otherwise_gets_no_name",
    ),
    Mutation(
        "conversion: a key may be missing",
        "06_fsdp_zero/_convert_checkpoint_files.py",
        "    if problems:\n",
        '    if [problem for problem in problems if "missing" not in problem]:\n',
        CONVERSION + "weights_that_do_not_fit_are_named[a missing weight]",
    ),
    # --- the comparison
    Mutation(
        "comparison: a collective is counted twice",
        COUNT,
        "        self.traffic.calls[kind] += 1\n",
        "        self.traffic.calls[kind] += 2\n",
        COMPARISON + "a_dry_run_is_what_two_ranks_measure",
    ),
    Mutation(
        "comparison: an all-reduce sends its tensor round once",
        COUNT,
        '("all_reduces", 2)',
        '("all_reduces", 1)',
        COMPARISON + "a_dry_run_is_what_two_ranks_measure",
    ),
    Mutation(
        "comparison: HSDP has one copy",
        COMPARE,
        'shard(net, job, job.replicas if method == "HSDP" else 1)',
        "shard(net, job, 1)",
        COMPARISON + "it_runs_bare",
    ),
    Mutation(
        "comparison: the loss is that of rank 0",
        COMPARE,
        "    mean_loss = statistics.fmean(runtime.gather(loss.item()))\n",
        "    mean_loss = loss.item()\n",
        COMPARISON + "the_loss_is_the_mean_over_the_ranks",
    ),
    # --- Muon
    Mutation(
        "Muon: each rank orthogonalises its rows",
        MUON,
        "                direction = orthogonalize(whole) * rms_of_adamw(whole)\n",
        "                parts = [whole] if whole is update else whole.chunk(dist.get_world_size())\n"
        "                direction = torch.cat([orthogonalize(rows) for rows in parts]) * rms_of_adamw(whole)\n",
        WITH_MUON + "sharded_is_one_process[3]",
    ),
    Mutation(
        "Muon: the momentum is that of the step before",
        MUON,
        '                update = matrix.grad.lerp(state["momentum"], group["momentum"])',
        '                update = state["momentum"].clone()',
        WITH_MUON + "the_optimizer_is_that_of_torch",
    ),
    Mutation(
        "Muon: weights decay without the learning rate",
        MUON,
        'matrix.mul_(1 - group["lr"] * group["weight_decay"])',
        'matrix.mul_(1 - group["weight_decay"])',
        WITH_MUON + "the_optimizer_is_that_of_torch",
    ),
    Mutation(
        "Muon: embeddings are among its matrices",
        MUON,
        'in_block = path.startswith("model.layers.") and parameter.ndim == 2',
        "in_block = parameter.ndim == 2",
        WITH_MUON + "only_the_matrices_of_blocks_are_muons",
    ),
    # --- the largest model
    Mutation(
        "the ladder takes a rung that does not fit",
        BIG,
        "            if peak <= (1 - FREE_SHARE) * args.memory_bytes:\n",
        "            if peak <= 2 * args.memory_bytes:\n",
        BIG_TESTS + "the_first_rung_that_fits_is_trained",
    ),
    Mutation(
        "the step inside backward is left out",
        BIG,
        "        return net, step_inside_backward(net, make)\n",
        "        return net, [make(net.parameters())]\n",
        BIG_TESTS + "the_predicted_peak_is_that_of_a_step",
    ),
    Mutation(
        "a model made block by block has no tables of angles",
        BIG,
        "    net.model.to_empty(device=device, recurse=False)  # the tables of angles\n",
        "",
        BIG_TESTS + "qlora_trains_adapters_alone_and_draws_every_weight",
    ),
    # --- generation, and what it keeps
    Mutation(
        "a token of the cache sees the slot after its own",
        GENERATE,
        "        return (self.slots <= positions.unsqueeze(-1)).unsqueeze(1)\n",
        "        return (self.slots <= positions.unsqueeze(-1) + 1).unsqueeze(1)\n",
        GENERATION + "a_token_sees_none_after_it",
    ),
    Mutation(
        "every row decodes at the longest row's position",
        GENERATE,
        "sampler(decode(tokens, lengths + step))",
        "sampler(decode(tokens, lengths.amax().expand_as(lengths) + step))",
        GENERATION + "a_row_is_the_same_alone_and_in_a_batch",
    ),
    Mutation(
        "top-p drops the token that reaches the share",
        GENERATE,
        "before >= top_p)",
        "before + likely >= top_p)",
        GENERATION + "probabilities_are_as_defined_and_as_in_transformers",
    ),
    Mutation(
        "what is drawn does not depend on the seed",
        GENERATE,
        "torch.rand(rows, generator=self.generator, device=device)",
        "torch.rand(rows, device=device)",
        GENERATION + "a_seed_gives_the_same_tokens",
    ),
    Mutation(
        "a row goes on after its stop token",
        GENERATE,
        "        if row in result.finished or token in stop:\n",
        "        if token in stop:\n",
        GENERATION + "a_row_ends_at_its_stop_token_and_the_loop_with_the_last_row",
    ),
    Mutation(
        "a stream writes half a character",
        INFERENCE,
        """ and not whole.endswith("\\N{REPLACEMENT CHARACTER}"):""",
        ":",
        GENERATION + "a_stream_has_whole_characters_only",
    ),
    Mutation(
        "blocks are read in another order than the text's",
        KV_CACHE,
        "part[layer][self.table].flatten(1, 2)",
        "part[layer][self.table.sort().values].flatten(1, 2)",
        KV_CACHE_TESTS + "a_cache_in_a_row_and_in_blocks_is_none_at_all",
    ),
    Mutation(
        "a block that is not full is shared",
        KV_CACHE,
        "        table = self.tables[other][: tokens // BLOCK]\n",
        "        table = self.tables[other][: blocks_for(tokens)]\n",
        KV_CACHE_TESTS + "shared_blocks_are_free_when_the_last_one_leaves",
    ),
    Mutation(
        "a shared block is free when its first user leaves",
        KV_CACHE,
        "            if self.users[block] == 0:\n",
        "            if self.users[block] >= 0:\n",
        KV_CACHE_TESTS + "shared_blocks_are_free_when_the_last_one_leaves",
    ),
    Mutation(
        "whoever gives up its blocks is forgotten",
        KV_CACHE,
        "            waiting.appendleft(running.pop())\n",
        "            running.pop()\n",
        KV_CACHE_TESTS + "who_gives_up_its_blocks_goes_on_with_the_same_tokens[True]",
    ),
    Mutation(
        "continuous batching waits for the whole batch",
        KV_CACHE,
        "        admitting = continuous or not running\n",
        "        admitting = not running\n",
        KV_CACHE_TESTS + "continuous_batching_fills_a_row_as_soon_as_it_is_free",
    ),
    Mutation(
        "a conversation comes back with keys for values",
        "07_memory_tricks/_kv_cache_offload.py",
        "    for part, waiting in zip((*cache.keys.values(), *cache.values.values()), away.parts, strict=True):\n",
        "    for part, waiting in zip((*cache.values.values(), *cache.keys.values()), away.parts, strict=True):\n",
        KV_CACHE_TESTS + "a_conversation_that_was_away_goes_on",
    ),
    # --- answering from several devices
    Mutation(
        "a rank reads its rows from the first one on",
        "06_fsdp_zero/_infer_70b_weights.py",
        "copy_(stored[(slice(begin, end), *columns)])",
        "copy_(stored[(slice(begin - rows.start, end - rows.start), *columns)])",
        "tests/test_06_infer_70b.py::test_tensor_parallel_gives_the_tokens_of_transformers[even-2]",
    ),
    Mutation(
        "device-map's tokens see the padding of a shorter prompt",
        "06_fsdp_zero/_infer_70b_device_map.py",
        "torch.arange(longest, device=batch_lengths.device) < batch_lengths[:, None]",
        "torch.arange(longest, device=batch_lengths.device) < longest + 0 * batch_lengths[:, None]",
        "tests/test_06_infer_70b.py::test_device_map_gives_the_tokens_of_transformers[all of it-even]",
    ),
    Mutation(
        "the wait for a line is not looked up from",
        "06_fsdp_zero/_infer_70b_terminal.py",
        "[], LOOK_UP_SECONDS)[0]",
        "[])[0]",
        "tests/test_06_infer_70b.py::test_a_signal_that_another_thread_takes_ends_the_wait_for_a_line[15]",
    ),
    Mutation(
        "the exporter waits for a signal in the main thread",
        "01_devices/monitor.py",
        "                time.sleep(1)\n",
        "                signal.pause()\n",
        "tests/test_01_monitor.py::test_a_signal_that_a_thread_of_the_server_takes_ends_the_exporter[15]",
    ),
    Mutation(
        "a shard that the index names is not looked for",
        "common/hf.py",
        "if not (folder / name).is_file()]:",
        "if False]:",
        "tests/test_06_infer_70b.py::test_a_folder_that_is_not_whole_is_refused",
    ),
    Mutation(
        "every rank of ZeRO-3 takes the first run of a weight's numbers",
        "06_fsdp_zero/_infer_70b_weights.py",
        "begin = dist.get_rank() * own.numel()",
        "begin = 0",
        "tests/test_06_infer_stages.py::test_zero3_gives_the_tokens_of_transformers[tied-2-cpu]",
    ),
    Mutation(
        "rows of a large random matrix come again",
        "06_fsdp_zero/_infer_70b_weights.py",
        "TILE = 1_000_003 ",
        "TILE = 1_021_000 ",
        "tests/test_06_infer_70b.py::test_any_part_of_a_random_matrix_is_that_part_of_the_whole",
    ),
    Mutation(
        "seven ranks are said to share eight key-value heads",
        "06_fsdp_zero/_infer_70b_placement.py",
        "if not undivided(config, ranks) and needed",
        "if needed",
        "tests/test_06_infer_70b.py::test_what_cannot_fit_is_told_with_what_would",
    ),
    Mutation(
        "each rank is said to hold the whole embedding",
        "06_fsdp_zero/_infer_70b_placement.py",
        "estimated.embedding_parameters(shape) / ranks\n",
        "estimated.embedding_parameters(shape)\n",
        "tests/test_06_infer_70b.py::test_a_dry_run_has_the_published_bytes",
    ),
    Mutation(
        "the head is left whole on each rank",
        "06_fsdp_zero/infer_70b.py",
        '        "lm_head": ColwiseParallel(output_layouts=Replicate()),',
        "",
        "tests/test_06_infer_70b.py::test_a_dry_run_has_the_published_bytes",
    ),
    Mutation(
        "quantize: a folder's weights are not read",
        QUANTIZE_MODEL,
        "    net = model.build(name, config, seed=0, device=device)",
        '    net = model.build("nano", config, seed=0, device=device)',
        QUANTIZATION + "quantize_measures_the_model_of_a_folder",
    ),
    Mutation(
        "quantize: a large model's layers are scanned on two sequences",
        QUANTIZE_MODEL,
        "    return [(inputs[:4], targets[:4])]",
        "    return [(inputs[:2], targets[:2])]",
        QUANTIZATION + "quantize_measures_the_model_of_a_folder",
    ),
    Mutation(
        "quantize: a space is a byte in every vocabulary",
        "02_tensors_precision/quantize.py",
        '        "spaces": torch.full_like(inputs, space),',
        '        "spaces": torch.full_like(inputs, ord(" ")),',
        QUANTIZATION + "calibration_texts_are_in_the_models_own_tokens",
    ),
    Mutation(
        "quantize: integer kernels are tried on zeros",
        "02_tensors_precision/_quantize_kernels.py",
        " * (sizes[name] if sizes else 1)",
        "",
        QUANTIZATION + "kernels_of_activations_are_tried_where_these_are_not_all_zero",
    ),
    Mutation(
        "qat: clips in the way that costs more",
        "02_tensors_precision/qat.py",
        "    return min(whole, fitted, key=",
        "    return max(whole, fitted, key=",
        QUANTIZATION + "qat_clips_in_the_way_that_costs_less_on_the_calibration_set",
    ),
    Mutation(
        "decode: a ratio of rounds that were not neighbours",
        "benchmarks/vs_generate.py",
        "        pairs = zip(runs[side], runs[against], strict=True)",
        "        pairs = zip(runs[side], runs[against][::-1], strict=True)",
        BENCHMARKS + "decode_ratios_are_taken_round_by_round",
    ),
    Mutation(
        "decode: an embedding that is only looked up counts as read",
        "benchmarks/_generate.py",
        "    return sum(parameter.nbytes for parameter in net.parameters()) - looked_up",
        "    return sum(parameter.nbytes for parameter in net.parameters())",
        BENCHMARKS + "generate_is_timed_on_our_weights_and_gives_our_tokens",
    ),
    Mutation(
        "decode on a GPU: only what came last is on disk",
        "benchmarks/inference_gpu.py",
        "            save(about, chosen, found, new_tokens)\n    return found",
        "    save(about, chosen, found, new_tokens)\n    return found",
        BENCHMARKS + "decode_on_a_gpu_in_turns_with_results_on_disk",
    ),
    Mutation(
        "two stages hold the same layer",
        STAGES,
        "    start = rank * each + min(rank, more)\n",
        "    start = rank * each\n",
        WITH_STAGES + "stages_share_the_layers_evenly_and_in_order",
    ),
    Mutation(
        "all micro-batches are sampled with the numbers of the first",
        STAGES,
        "drawn=drawn[part.rows]",
        "drawn=drawn[: len(part.ids)]",
        WITH_STAGES + "parts_of_a_batch_are_sampled_as_one_process_samples_the_whole[pipeline-2-3]",
    ),
    Mutation(
        "a stage writes each new token one slot too far",
        STAGES,
        "(part.lengths + step - 1)[:, None]",
        "(part.lengths + step)[:, None]",
        WITH_STAGES + "a_pipeline_gives_the_tokens_of_transformers[untied-2-0]",
    ),
    Mutation(
        "the tied last stage multiplies with a matrix of its own",
        STAGES,
        "    if rank > 0 and not (last and config.tie_word_embeddings):",
        "    if rank > 0:",
        WITH_STAGES + "a_pipeline_gives_the_tokens_of_transformers[tied-3-2]",
    ),
    Mutation(
        "a micro-batch ends with its first prompt",
        STAGES,
        "len(self.result.finished) == len(self.ids)",
        "len(self.result.finished) > 0",
        WITH_STAGES + "each_prompt_ends_at_its_own_stop_token[pipeline]",
    ),
    Mutation(
        "ZeRO-3's ranks know their own tokens only",
        ZERO3,
        "        dist.all_reduce(tokens)  # each row is zero on all ranks but one\n",
        "",
        WITH_STAGES + "zero3_gives_the_tokens_of_transformers[tied-2-cpu]",
    ),
    # --- weights of 8 and 4 bits
    Mutation(
        "int4 codes are packed in the other order",
        QUANTIZED_PRODUCTS,
        "    return codes[:, ::2] << 4 | codes[:, 1::2]\n",
        "    return codes[:, 1::2] << 4 | codes[:, ::2]\n",
        QUANTIZED_TESTS + "int4_codes_come_back_to_the_bit",
    ),
    Mutation(
        "int8 scales are too small for the largest weight",
        "07_memory_tricks/quantized_inference.py",
        "        scale = (weight.abs().amax(1) / 127).bfloat16()\n",
        "        scale = (weight.abs().amax(1) / 129).bfloat16()\n",
        QUANTIZED_TESTS + "a_row_shares_a_scale",
    ),
    Mutation(
        "keys and values change places in the merged product",
        "07_memory_tricks/_quantized_inference_load.py",
        'self_attn.{part}_proj.weight" for part in "qkv"))\n',
        'self_attn.{part}_proj.weight" for part in "qvk"))\n',
        QUANTIZED_TESTS + "it_is_the_model_with_dequantized_weights",
    ),
    Mutation(
        "an int8 cache reads values with the scales of keys",
        "07_memory_tricks/_quantized_inference_cache.py",
        "(self.values, self.value_scales))\n",
        "(self.values, self.key_scales))\n",
        QUANTIZED_TESTS + "an_int8_cache_is_off_by_half_a_step",
    ),
    Mutation(
        "after a refused guess the large model draws from all it has",
        QUANTIZED_GUESSES,
        "    missing = (wanted - given).clamp(min=0)\n",
        "    missing = wanted\n",
        QUANTIZED_TESTS + "guesses_do_not_change_the_distribution",
    ),
    Mutation(
        "refused guesses are not rolled back",
        QUANTIZED_GUESSES,
        "        position += fresh[0] + 1\n",
        "        position += draft_tokens + 1\n",
        QUANTIZED_TESTS + "guesses_do_not_change_greedy_tokens",
    ),
    Mutation(
        "the draft's cache lacks its last guess",
        QUANTIZED_GUESSES,
        "        models.draft_decode(tokens[-1], ahead[-1:] + position)  # for its cache, should all be kept\n",
        "",
        QUANTIZED_TESTS + "a_draft_that_is_the_model_is_always_right",
    ),
    Mutation(
        "the draft's last step is not counted in what a step reads",
        "07_memory_tricks/quantized_inference.py",
        "        read += (args.draft_tokens + 1) * draft.loaded.bytes_per_step\n",
        "        read += args.draft_tokens * draft.loaded.bytes_per_step\n",
        QUANTIZED_TESTS + "a_draft_and_a_small_cache_on_the_command_line",
    ),
    Mutation(
        "a compiled token attends to the part of its cache that is still empty",
        QUANTIZED_PRODUCTS,
        ".sum(-1).masked_fill(~seen, -torch.inf)\n",
        ".sum(-1)\n",
        QUANTIZED_TESTS + "attention_of_a_token_written_out_is_torchs",
    ),
    Mutation(
        "an int4 matrix is packed with all its codes unpacked",
        QUANTIZED_PRODUCTS,
        "        blocks = padded.split(rows_at_once(columns))",
        "        blocks = padded.split(len(padded))",
        QUANTIZED_TESTS + "a_part_of_a_matrix_at_a_time",
    ),
    Mutation(
        "the last of the tokens that are read late is not read",
        "common/generate.py",
        "    if read_before is not None:\n        take(read_before(), result, stop, on_tokens)\n    result.",
        "    result.",
        QUANTIZED_TESTS + "tokens_that_are_read_late_are_the_same",
    ),
    # --- model parallelism
    Mutation(
        "keys get only their own rank's gradients",
        "08_model_parallel/_train_3d_context.py",
        "        reduce_scatter(own, torch.cat(parts), group=context.group)\n",
        "        own = parts[dist.get_rank(context.group)].contiguous()\n",
        "tests/test_08_train_3d.py::test_any_mesh_is_one_process[context]",
    ),
    Mutation(
        "each stage clips by its own norm",
        "08_model_parallel/_train_3d_stages.py",
        "    dist.all_reduce(squared, group=mesh.get_group())\n",
        "",
        "tests/test_08_train_3d.py::test_any_mesh_is_one_process[stages]",
    ),
    Mutation(
        "the schedule divides gradients by the micro-batches",
        "08_model_parallel/_train_3d_stages.py",
        "loss_fn=loss, scale_grads=False)",
        "loss_fn=loss, scale_grads=True)",
        "tests/test_08_train_3d.py::test_any_mesh_is_one_process[stages]",
    ),
    Mutation(
        "context ranks all start at position 0",
        "08_model_parallel/train_3d.py",
        "torch.arange(args.seq_len, device=device)[columns].expand(",
        "torch.arange(args.seq_len // args.cp, device=device).expand(",
        "tests/test_08_train_3d.py::test_any_mesh_is_one_process[context]",
    ),
    Mutation(
        "the gradient norm of whole weights counts once per rank",
        TENSOR,
        '"whole" if cut_dimension(name) is None else "cut"',
        '"cut"',
        TENSOR_TESTS + "each_cut_trains_as_one_process_does[grouped-2]",
    ),
    Mutation(
        "with sequence parallelism nobody adds up the norms' gradients",
        TENSOR,
        "        gradient.copy_(total)\n",
        "        total.copy_(gradient)\n",
        TENSOR_TESTS + "each_cut_trains_as_one_process_does[grouped-2]",
    ),
    Mutation(
        "padding counts in the loss on cut logits",
        TENSOR,
        "    counted = targets != data.PADDING\n",
        "    counted = torch.ones_like(targets)\n",
        TENSOR_TESTS + "the_cut_cross_entropy_of_one_rank_is_torchs",
    ),
    Mutation(
        "parallelize_module's broken tie stays broken",
        "08_model_parallel/_tensor_parallel_torch.py",
        "    net.tie_weights()  # parallelize_module has made two parameters of one\n",
        "",
        TENSOR_TESTS + "tied_weights_stay_tied",
    ),
    Mutation(
        "a micro-batch's loss is divided by the number of micro-batches too",
        PIPELINE,
        "batch.targets[micro_batch]) / batch.tokens\n",
        "batch.targets[micro_batch]) / batch.tokens / len(batch.targets)\n",
        PIPELINE_TESTS + "each_schedule_trains_as_one_process_does[2]",
    ),
    Mutation(
        "a stage clips by its own norm",
        PIPELINE,
        "    dist.all_reduce(squared_norm)\n",
        "",
        PIPELINE_TESTS + "each_schedule_trains_as_one_process_does[2]",
    ),
    Mutation(
        "messages stand in the order of the ranks, not of time",
        REPLAY,
        "in sorted(ended):\n",
        "in ended:\n",
        PIPELINE_TESTS + "the_lists_end_even_if_every_call_blocks[1F1B-2-2-1]",
    ),
    Mutation(
        "1F1B warms up with one micro-batch too many",
        PIPELINE,
        "warm_up=ranks - rank - 1)\n",
        "warm_up=ranks - rank)\n",
        PIPELINE_TESTS + "the_bubble_is_that_of_the_formula[1F1B-2-6-1]",
    ),
    Mutation(
        "the softmax of ring attention forgets to rescale what it had",
        "08_model_parallel/_context_parallel_tiles.py",
        "    out *= (log_sum_exp - new_log_sum_exp).exp()[..., None]\n",
        "",
        CONTEXT_TESTS + "on_one_rank_it_is_attention[heads1-ring, zigzag]",
    ),
    Mutation(
        "zigzag pairs a chunk with its neighbour",
        "08_model_parallel/_context_parallel_order.py",
        "[rank, 2 * dist.get_world_size() - 1 - rank]",
        "[2 * rank, 2 * rank + 1]",
        CONTEXT_TESTS + "tiles_cover_what_a_causal_mask_shows[3-zigzag]",
    ),
    Mutation(
        "keys and values that were gathered give each rank the gradient of its own use alone",
        CONTEXT,
        "        reduce_scatter(my_gradient, parts)\n",
        "        reduce_scatter(my_gradient, parts)\n        my_gradient = parts[dist.get_rank()]\n",
        CONTEXT_TESTS + "every_way_trains_as_one_process_does[odd-3]",
    ),
    Mutation(
        "a rank divides its loss by its own targets",
        CONTEXT,
        "    counted_tokens = (targets != data.PADDING).sum()",
        "    counted_tokens = (targets[:, positions_of_rank(trainee.order, inputs.shape[1])] != data.PADDING).sum()",
        CONTEXT_TESTS + "every_way_trains_as_one_process_does[odd-3]",
    ),
    Mutation(
        "the balance loss takes a rank's own share of choices",
        EXPERTS,
        "    share_of_choices = chosen.sum(0) / chosen.sum()\n",
        "    share_of_choices = chosen[dist.get_rank()] / chosen[dist.get_rank()].sum()\n",
        EXPERT_TESTS + "the_number_of_ranks_changes_nothing[2]",
    ),
    Mutation(
        "over capacity the first tokens are dropped",
        EXPERTS,
        "[group[:kept] for",
        "[group[len(group) - kept :] for",
        EXPERT_TESTS + "over_capacity_the_last_tokens_are_dropped",
    ),
    Mutation(
        "each rank has the whole capacity for itself",
        EXPERTS,
        "        of_ranks_before = chosen.cumsum(0) - chosen\n",
        "        of_ranks_before = torch.zeros_like(chosen)\n",
        EXPERT_TESTS + "capacity_is_shared_out_in_the_order_of_the_ranks",
    ),
    Mutation(
        "the gradient norm lacks the experts of other ranks",
        EXPERTS,
        "    all_reduce(squares_of_experts)\n",
        "    all_reduce(squares_of_experts.clone())\n",
        EXPERT_TESTS + "the_number_of_ranks_changes_nothing[2]",
    ),
    Mutation(
        "a bubble of pp micro-batches, not pp - 1",
        "08_model_parallel/plan.py",
        '    step["bubble"] = (layout.pp - 1) / layout.virtual * sum(busy) / layout.pp\n',
        '    step["bubble"] = layout.pp / layout.virtual * sum(busy) / layout.pp\n',
        "tests/test_08_plan.py::test_the_bubble_is_that_of_1f1b[4-8]",
    ),
    Mutation(
        "members of a ring on one node share one network port",
        "08_model_parallel/_plan_collectives.py",
        "    return min(link, inside * network) if inside > 1 else network\n",
        "    return min(link, network)\n",
        "tests/test_08_plan.py::test_collectives_by_hand",
    ),
    Mutation(
        "replicas are counted as shards",
        "08_model_parallel/_plan_layout.py",
        "    return replace(layout, gpus=layout.gpus // layout.replicate) if layout.zero == 3 else layout\n",
        "    return layout\n",
        "tests/test_08_plan.py::test_replicas_hold_what_one_sharded_model_holds",
    ),
    Mutation(
        "inputs that tensor ranks gather are thought to be freed",
        "07_memory_tricks/_estimate_frameworks.py",
        "        gathered_inputs=True,\n        gathered_keys=True,\n",
        "        gathered_keys=True,\n",
        ESTIMATE + "tensor_and_context_parallel_ranks_share_what_they_can",
    ),
    Mutation(
        "keys and values of other context ranks are thought to be freed",
        "07_memory_tricks/_estimate_frameworks.py",
        "        gathered_keys=True,\n",
        "",
        ESTIMATE + "tensor_and_context_parallel_ranks_share_what_they_can",
    ),
    Mutation(
        "gradients are thought to be sharded while a pipeline runs",
        "07_memory_tricks/_estimate_frameworks.py",
        "        gathered_keys=True,\n        whole_in_pipelines=True,\n",
        "        gathered_keys=True,\n",
        "tests/test_08_plan.py::test_bytes_of_ranks_are_as_predicted[all]",
    ),
    Mutation(
        "a bad prediction passes the check",
        "08_model_parallel/_plan_report.py",
        '        row["near"] = abs(error) <= NEAR[row["line"]]\n',
        '        row["near"] = error <= 1\n',
        "tests/test_08_plan.py::test_check_says_which_line_is_off",
    ),
    Mutation(
        "copies of the model all-reduce after each micro-batch",
        "06_fsdp_zero/train_fsdp.py",
        "set_requires_all_reduce(micro_step == accumulation_steps)",
        "set_requires_all_reduce(True)",
        "tests/test_06_fsdp.py::test_sharded_over_four_ranks_is_one_process[two copies]",
    ),
    Mutation(
        "copies of the model all-reduce after each micro-batch in 3D too",
        "08_model_parallel/train_3d.py",
        "set_requires_all_reduce(micro_step == one_by_one)",
        "set_requires_all_reduce(True)",
        "tests/test_06_fsdp.py::test_copies_meet_once_a_step_in_3d_too",
    ),
    Mutation(
        "what does not fit is ranked",
        "08_model_parallel/plan.py",
        "        if total <= machine.memory_bytes:\n",
        "        if total <= 2 * machine.memory_bytes:\n",
        "tests/test_08_plan.py::test_the_ranking_is_by_time_under_the_memory_limit",
    ),
]


def copy_of_the_repository(folder: Path) -> Path:
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder)
    return folder


def pytest(folder: Path, *tests: str) -> subprocess.CompletedProcess:
    """Run these tests of a copy. Its corpora stay in there: a fault may be in how they are split."""
    flags = ["-x", "-q", "-p", "no:cacheprovider", "-m", "", "--timeout", str(SECONDS_PER_TEST)]
    # two versions of a file may have one size and be written within one second, which is what a .pyc goes by
    env = clean_env(CORPUS_CACHE=str(folder / "corpora"), PYTHONDONTWRITEBYTECODE="1", COLLECTIVE_TIMEOUT_SECONDS="60")
    argv = [sys.executable, "-m", "pytest", *flags, *tests]
    limit = (SECONDS_PER_TEST + 60) * len(tests)
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)


def judge(mutation: Mutation, folder: Path) -> dict:
    """Plant the fault in the copy, run its test there, and take the fault out again."""
    start, file = time.monotonic(), folder / mutation.file
    whole = file.read_text()
    shutil.rmtree(folder / "corpora", ignore_errors=True)
    try:
        mutation.apply(folder)
        result = pytest(folder, mutation.test)
    finally:
        file.write_text(whole)
    told = re.findall(r"^E +(.+)", result.stdout, re.MULTILINE) or re.findall(r"^(.*Timeout.*)", result.stdout, re.M)
    # ERROR file::test: the run failed that a fixture makes for several tests. A file that cannot be imported has no ::
    failed = re.search(r"^(FAILED|ERROR \S+\.py::)", result.stdout, re.MULTILINE)
    caught = result.returncode == TESTS_FAILED and failed is not None
    row = {"name": mutation.name, "file": mutation.file, "test": mutation.test, "seconds": time.monotonic() - start}
    row |= {"exit_code": result.returncode, "told": told[0][:160] if told else None, "caught": caught}
    if not caught:
        row["output"] = result.stdout[-2000:] + result.stderr[-2000:]
    return row


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--only", metavar="WORDS", help="the faults whose names hold these")
    parser.add_argument("--list", action="store_true", help="name the faults and their tests, and plant nothing")
    parser.add_argument("--jobs", type=cli.positive_int, default=2, help="faults at a time, each in its own copy")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the table as one JSON object")
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.only is None or args.only in mutation.name]
    if not chosen:
        raise exits.UserError(f"--only {args.only}: no fault's name holds that (--list has them)")
    if args.list:
        print(report.table([["fault", "file", "test"], *([m.name, m.file, m.test] for m in chosen)]))
        return 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-", ignore_cleanup_errors=True) as name:
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(args.jobs):
            copies.put(copy_of_the_repository(Path(name, str(i))))

        @contextlib.contextmanager
        def a_copy():
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def sound(tests: list[str]) -> subprocess.CompletedProcess:
            with a_copy() as copy:
                return pytest(copy, *tests)

        def planted(mutation: Mutation) -> dict:
            with a_copy() as copy:
                return judge(mutation, copy)

        with ThreadPoolExecutor(args.jobs) as pool:
            tests = sorted({mutation.test for mutation in chosen})
            shares = [tests[i :: args.jobs] for i in range(args.jobs) if tests[i :: args.jobs]]
            for result in pool.map(sound, shares):
                if result.returncode:
                    print(result.stdout[-6000:])
                    raise exits.UserError("without a fault these tests must pass, and one does not")
            print(f"no fault: {len(tests)} tests pass, {time.monotonic() - start:.0f} s", flush=True)
            rows = []
            for row in pool.map(planted, chosen):
                rows.append(row)
                verdict = f"caught: {row['told']}" if row["caught"] else f"SURVIVED (pytest exit {row['exit_code']})"
                print(f"{row['seconds']:5.1f} s  {row['name']}: {verdict}", flush=True)
                print(row.get("output", ""), end="")
    survivors = [row["name"] for row in rows if not row["caught"]]
    seconds = time.monotonic() - start
    print(f"\nfaults planted: {len(rows)}, survived: {len(survivors)}, {seconds:.0f} s")
    summary = {"device": "cpu", "seconds": seconds, "planted": len(rows), "survived": survivors, "rows": rows}
    report.write_json(summary, args.json)
    return 1 if survivors else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    exits.run(main)
