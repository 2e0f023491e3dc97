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
EQUIVALENCE, FAULTS = "tests/test_equivalence.py::test_", "tests/test_faults.py::test_"
SHARDING = "tests/test_06_fsdp.py::test_"
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
        "is_causal=True",
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
        "        y = F.scaled_dot_product_attention(q, k, v,",
        "        k, v = (part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in (k, v))\n"
        "        y = F.scaled_dot_product_attention(q, k, v,",
        "tests/test_model.py::test_logits_equal_those_of_transformers",
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
        "            _exit(2)\n",
        "            _exit(1)\n",
        FAULTS + "bad_input[04_amp/train.py-model]",
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
    caught = result.returncode == TESTS_FAILED and re.search(r"^FAILED ", result.stdout, re.MULTILINE) is not None
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
