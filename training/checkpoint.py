"""Save checkpoints of a training run, and resume from the newest one that is intact.

A run has one folder:

    run.json            settings, such as --data, which must not change on a resume, and flags,
                        which a resume uses unless others are given (training/flags.py)
    .lock.lease         held by the process that trains in this folder (training/lock.py)
    stop, save          created by the user to stop the run, or to save a checkpoint now; the run
                        deletes them (common.runtime.watch_folder)
    metrics.jsonl       written by training.meter.Meter, with loss.png, tensorboard/ and wandb/
    step-00000200/      a checkpoint: the weights, optimizer state and schedule after step 200
        .metadata, __0_0.distcp, __1_0.distcp, ...    files of torch.distributed.checkpoint (DCP):
                        an index, and what rank 0, rank 1, ... wrote
        config.json     the shape of the model, as Hugging Face writes it; not for your own model
        hashes.json     the SHA-256 of each file in this folder
    step-00000300-xxxxxxxx.tmp/    a checkpoint that is being written, or that a killed process left
    step-00000100-xxxxxxxx.old/    a checkpoint that is being deleted: --keep N keeps the newest N,
                        and --keep-best the one with the lowest held-out loss, too
    broken-step-...     a checkpoint that a resume found damaged

A rank is one of the processes that train together, usually with one GPU each. A shard is the part
of a tensor that one rank holds.

A save is atomic. Each rank writes its own file to step-N-xxxxxxxx.tmp and hashes it. When all ranks
are done, rank 0 adds hashes.json and renames the folder to step-N. So step-N is always complete, no
matter when a process is killed. With --async-save a thread does this while training continues with
the next steps; training waits only for a copy of the state in CPU memory.

A run deletes only what it has written: folders with the mark of common/files.py, and checkpoints
step-N, whose mark is hashes.json. What you rename stays.

A resume compares the files of the newest checkpoint with their hashes. If they do not match, for
example because of a disk error, it tries the checkpoint before. When it finds an intact one, it
renames the damaged ones to broken-step-N-... and continues from there.

A checkpoint does not depend on the number of ranks that saved it. DCP stores each tensor under its
name, with the position of each rank's shard in the full tensor. On loading, each rank reads the
parts of the files that overlap with its own shard.
"""

import argparse
import contextlib
import os
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from common import files
from common.exits import UserError, at_exit, disk_message, free_space, user_message
from common.runtime import (
    all_gather,
    is_rank0,
    on_rank0,
    print0,
    ranks,
    timeout,
    together,
    watch_folder,
)
from training import flags
from training.lock import InUseError, Lock
from training.run_folder import (
    RUN_FILE,
    RUN_FILES,
    Evaluated,
    best_first,
    file_sha256,
    find_best,
    find_damage,
    is_checkpoint,
    list_checkpoints,
    read_run,
    read_settings,
)

# All ranks must call these together:
#   all_gather(value)   gives every rank the list of all ranks' values
#   on_rank0(work)      calls work() on rank 0; every rank gets its result, or raises its exception
#   together(work)      calls work() on every rank; every rank gets the list of the results, or
#                       raises the first exception

# torch.distributed.checkpoint takes 0.6 s to import. The functions below import it when they need
# it, so that the first training step does not wait for it.

# 04_amp/train.py has no process group, and saves without one on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

STATE_DICT_OPTIONS = {
    # Name optimizer state after parameters, such as state.model.norm.weight.exp_avg. These names
    # do not depend on DDP, FSDP or the number of ranks.
    "flatten_optimizer_state_dict": True,
    # Frozen weights are not saved: they are still in the folder of the pretrained model.
    "ignore_frozen_params": True,
    # So set_state_dict must accept that they are missing. No check is lost: dcp.load, which runs
    # before it, raises if any other tensor is missing.
    "strict": False,
}


DATE = "date"  # the setting that start_date returns


class Run:
    """Manage the folder of one run: lock it, save checkpoints to it, find the newest intact one.

    Every public method is a collective: if a rank does not call it, the others wait for it.

    `settings` maps flags to values, such as {"--data": "stdlib (SHA-256 ...)"}; JSON must represent
    the values exactly. Those of a resumed run must match those in the folder: see
    training.flags.same_setting. `args` needs:

        run_dir     Path of the folder, or None for a new one in runs/
        resume      bool: whether the folder may hold checkpoints
        keep        int: how many of the newest checkpoints to keep; 0 saves none
        keep_best   bool: whether to keep the one with the lowest held-out loss, too
        async_save  bool: whether a thread writes checkpoints

    Raise UserError if the folder cannot be written to, is not visible to all ranks, is in use by
    another process, belongs to a run with other settings, or holds checkpoints without `resume`.
    """

    def __init__(self, args: argparse.Namespace, *, settings: dict) -> None:
        _check_same_on_all_ranks(settings)
        self.settings = settings
        self.keep = args.keep
        self.keep_best = args.keep_best
        self.folder = args.run_dir or on_rank0(_new_folder)
        on_rank0(lambda: self._open_folder(settings, args))
        self._check_visible_to_all_ranks()

        # Saving needs its own process group. A save in the background sends messages while the
        # training sends its own, and within one group the two would be mixed up. Its backend is
        # gloo, which sends from CPU memory and leaves the GPU to the training.
        self.group = None
        if dist.is_initialized():
            self.group = dist.new_group(timeout=timeout(), backend="gloo")

        self.executor = ThreadPoolExecutor(max_workers=1) if args.async_save else None
        self.pending_save: Future | None = None
        at_exit.push(self._complete_save)

    def remember_flags(self, args: argparse.Namespace, micro_batch_size: int | None) -> None:
        """Write the flags and the size of a micro-batch, which a resumed run has as defaults.

        Raise UserError if the file cannot be written.
        """
        run = {
            "settings": self.settings,
            "flags": flags.remembered_flags(args, micro_batch_size),
        }
        try:
            on_rank0(partial(files.write_json, self.folder / RUN_FILE, run))
        except OSError as error:
            raise UserError(f"--run-dir {self.folder} cannot be used: {error}") from None

    def save(self, step: int, state: dict, config: dict | None) -> None:
        """Save `state`, made by training_state, as checkpoint step-N. With --keep 0, do nothing.

        `config` is the content of a Hugging Face config.json, or None. With --async-save, return as
        soon as the state is copied to CPU memory; a thread writes it to disk. If that fails, every
        later call of save or wait raises. Raise UserError if the files cannot be written.
        """
        self.wait()
        if self.keep == 0:
            return
        on_rank0(lambda: self.lock.check())
        if self.executor is None:
            self._write(step, state, config)
            return
        # The thread needs this rank's GPU: a new thread starts on GPU 0. A run on the CPU has not
        # initialized CUDA.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        cpu_state = tree_map_only(Tensor, _copy_to_cpu, state)
        self.pending_save = self.executor.submit(self._write, step, cpu_state, config, device)

    def wait(self) -> None:
        """Wait for the save in the background, if there is one. Raise UserError if it failed."""
        if self.pending_save is not None:
            self.pending_save.result()

    def _complete_save(self, _kind, error: BaseException | None, _trace) -> None:
        """Complete the save in the background before a script ends with an error of the user."""
        if error is not None and user_message(error) is not None:
            with contextlib.suppress(Exception):  # which must not hide that error
                self.wait()

    def find_intact(self) -> Path | None:
        """Return the newest intact checkpoint, or None if the folder has no checkpoint.

        This hashes the files of the checkpoint. Newer checkpoints that are damaged are renamed to
        broken-step-N-..., so that the run can save these steps again. Raise UserError if all are
        damaged.
        """
        checkpoints = on_rank0(lambda: list_checkpoints(self.folder))
        damaged = []
        for path in reversed(checkpoints):
            problem = _damage(path)
            if problem is None:
                on_rank0(lambda: _move_aside(damaged))
                print0(f"resuming from {path}")
                return path
            print0(f"checkpoint {path} is broken ({problem}): trying the one before")
            damaged.append(path)
        if damaged:
            raise UserError(
                f"--resume: every checkpoint in {self.folder} is broken; nothing was overwritten"
            )
        return None

    def _open_folder(self, settings: dict, args: argparse.Namespace) -> None:
        """Create the folder, lock it and check that this run may use it. Only rank 0 calls this."""
        flag = f"--run-dir {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.folder / ".lock.lease")
            self.lock.acquire(flags.lock_seconds())
            at_exit.callback(self.lock.release)
            self._check_settings(settings, args.resume)
            watch_folder(self.folder)  # for the files `stop` and `save`
            earlier = read_run(self.folder)["flags"]
            files.write_json(self.folder / RUN_FILE, {"settings": settings, "flags": earlier})
        except InUseError as error:
            raise UserError(
                f"{flag} is in use by a live run ({error}): choose another --run-dir, "
                "or end that run"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{flag} cannot be used: {error}") from None

        # Saves and deletions that were killed leave these folders.
        files.delete_leftovers(self.folder, r"step-\d+(-universal)?")

    def _check_settings(self, settings: dict, resume: bool) -> None:
        """Raise UserError if the folder belongs to a run that this one must not continue."""
        flag = f"--run-dir {self.folder}"
        checkpoints = list_checkpoints(self.folder)
        saved_settings = read_settings(self.folder)
        if not saved_settings:
            if checkpoints and not (self.folder / RUN_FILE).exists():
                raise UserError(
                    f"{flag} holds checkpoints without the {RUN_FILE} of their run: "
                    "copy that file there, too"
                )
            for name in RUN_FILES:
                if os.path.lexists(self.folder / name):
                    raise UserError(
                        f"{flag} holds a {name} that is damaged, or that no run has written: "
                        "nothing is overwritten; choose another --run-dir"
                    )
            return  # a new run

        # The hash of --data is over token ids. So if it is the same, the tokenizer is the same, and
        # its name may be written in another way, or left out where it is the default.
        same_tokens = flags.same_setting(settings.get("--data"), saved_settings.get("--data"))
        differences = []
        for name in dict.fromkeys([*settings, *saved_settings]):  # of both, each once
            now = settings.get(name)
            saved = saved_settings.get(name)
            if flags.same_setting(now, saved):
                continue
            if name == "--tokenizer" and same_tokens:
                continue
            differences.append(f"{name} {now} (was {saved})")
        if differences:
            raise UserError(
                f"{flag} holds a run with other settings: {', '.join(differences)}; "
                "choose another --run-dir"
            )

        if checkpoints and not resume:
            raise UserError(
                f"{flag} holds a run with checkpoints: add --resume, or choose another --run-dir"
            )

    def _check_visible_to_all_ranks(self) -> None:
        """Raise UserError if the folder is on a disk that some ranks do not see."""
        visible = all_gather((self.folder / RUN_FILE).exists())
        if not all(visible):
            raise UserError(
                f"--run-dir {self.folder}: rank {visible.index(False)} does not see it: "
                "choose a folder on a disk that all nodes share"
            )

    def _write(
        self, step: int, state: dict, config: dict | None, device: int | None = None
    ) -> None:
        """Write a checkpoint. With --async-save a thread runs this; `device` is its rank's GPU."""
        if device is not None:
            torch.cuda.set_device(device)
        final = self.folder / f"step-{step:08d}"

        def start() -> Path:
            return files.start_folder(final) if is_rank0() else final

        try:
            temporary = together(start, self.group)[0]
            write_files = partial(self._write_files, temporary, state, config)
            hashes = {}
            for hashes_of_rank in together(write_files, self.group):
                hashes.update(hashes_of_rank)
            publish = partial(self._publish, temporary, final, hashes)
            together(publish, self.group)
        except OSError as error:
            # On a full disk, torch.save (which DCP calls) does not say so. So name the free space.
            raise UserError(
                f"cannot save step {step} in {self.folder} ({free_space(self.folder)}): "
                f"{disk_message(error) or error}; older checkpoints are untouched"
            ) from None

    def _write_files(self, folder: Path, state: dict, config: dict | None) -> dict[str, str]:
        """Write this rank's files to `folder`. Return their SHA-256 by file name.

        06_fsdp_zero/_train_zero.py overrides this method to write DeepSpeed's files.
        """
        import torch.distributed.checkpoint as dcp

        # per_thread_copy_ahead=0: do not copy the next tensor from the GPU while one is written.
        # The stream for these copies would create a CUDA context, even if the run is on the CPU.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as error:
            first_failure, _traceback = next(iter(error.failures.values()))
            raise OSError(str(first_failure)) from None

        rank, _, _ = ranks()
        written = list(folder.glob(f"__{rank}_*"))
        if is_rank0():
            written.append(folder / ".metadata")
            if config is not None:
                files.write_json(folder / "config.json", config)
                written.append(folder / "config.json")
        return {file.name: file_sha256(file) for file in written}

    def _publish(self, temporary: Path, final: Path, hashes: dict[str, str]) -> None:
        """Rename the folder to step-N, then delete the oldest checkpoints. Rank 0 does all this."""
        if not is_rank0():
            return
        files.write_json(temporary / "hashes.json", hashes)
        files.finish_folder(temporary, final)

        # The new checkpoint is complete: a failure to delete old ones must not end the run.
        with contextlib.suppress(OSError):
            checkpoints = [path for path in list_checkpoints(self.folder) if is_checkpoint(path)]
            best = find_best(self.folder) if self.keep_best else None
            for path in checkpoints[: -self.keep]:
                if best is not None and path == best.folder:
                    continue
                if not path.is_symlink():  # the user has moved it, and may need it there
                    files.delete_replaced(path)


def start_date(args: argparse.Namespace) -> datetime:
    """Return when the run in --run-dir was started first. All ranks must call this.

    Chat templates may write the date into each chat. With the date of today, the data of a run
    would change every day. So a script whose data depends on the date uses the date that this
    function returns, and keeps it in the folder of the run:

        date = checkpoint.start_date(args)
        ...    date.strftime("%d %b %Y")
        settings = flags.settings(args, ...) | {checkpoint.DATE: date.isoformat()}
        run = checkpoint.Run(args, settings=settings)

    A new run gets the current date of rank 0.
    """

    def read() -> datetime:
        now = datetime.now()
        if args.run_dir is None:
            return now
        # If the file is missing or damaged, this is a new run, or Run will raise.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return datetime.fromisoformat(read_settings(args.run_dir)[DATE])
        return now

    return on_rank0(read)


def training_state(step: int, net, optimizer, scheduler, scaler=None) -> dict:
    """Return everything that a run needs to continue after `step`. All ranks must call this.

    Tensors stay sharded and on their device: this copies nothing. Parameters with
    requires_grad=False are left out.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(**STATE_DICT_OPTIONS)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    # If a frozen matrix has two names (tied embeddings), torch leaves out only the first. `net` is
    # the model itself, not what DDP or torch.compile made of it: so names have no prefix.
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            model_state.pop(name, None)
    return {
        "progress": {"step": step},
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler else {},
    }


def resume(run: Run, net, optimizer, scheduler, scaler=None) -> int:
    """Load the newest intact checkpoint of `run` into the given objects. Return its step.

    All ranks must call this. Their number may differ from when the checkpoint was saved. Return 0
    if the run has no checkpoint.
    """
    path = run.find_intact()
    if path is None:
        return 0
    return _load(path, run, net, optimizer, scheduler, scaler)


def load_best(run: Run, net, optimizer, scheduler, scaler=None) -> Evaluated | None:
    """Load the intact checkpoint of `run` with the lowest held-out loss, and return it.

    Load nothing, and return None, if no intact checkpoint was evaluated. All ranks must call this,
    after run.wait().
    """
    for best in on_rank0(lambda: best_first(run.folder)):
        problem = _damage(best.folder)
        if problem is None:
            print0(f"the lowest held-out loss, {best.val_loss:.4f}, is that of {best.folder}")
            _load(best.folder, run, net, optimizer, scheduler, scaler)
            return best
        print0(f"checkpoint {best.folder} is broken ({problem}): trying the next best")
    print0(f"{run.folder} has no intact checkpoint that was evaluated: the last weights are kept")
    return None


def _damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. The ranks share the work."""
    rank, world_size, _ = ranks()
    problems = all_gather(find_damage(path, rank, world_size))
    return next((problem for problem in problems if problem is not None), None)


def _load(path: Path, run: Run, net, optimizer, scheduler, scaler) -> int:
    """Load a checkpoint into the given objects. Return its step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    # dcp.load replaces the values of this state in place: the tensors, which are the shards of this
    # rank, and the numbers. Step 0 is a placeholder.
    state = training_state(0, net, optimizer, scheduler, scaler)
    dcp.load(state, checkpoint_id=path, process_group=run.group)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(**STATE_DICT_OPTIONS),
    )
    scheduler.load_state_dict(state["scheduler"])

    # --steps may change on a resume, and the schedule with it. The optimizer now has the learning
    # rate of the old schedule, so set that of the new one. last_epoch is the number of steps done.
    for parameter_group, base_lr, schedule in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        parameter_group["lr"] = base_lr * schedule(scheduler.last_epoch)
    if scaler:
        scaler.load_state_dict(state["scaler"])
    return state["progress"]["step"]


def _new_folder() -> Path:
    chapter = Path(sys.argv[0]).resolve().parent.name  # such as 05_ddp
    now = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", f"{chapter}-{now}-{os.getpid()}")


def _check_same_on_all_ranks(settings: dict) -> None:
    """Raise UserError if the ranks have different settings.

    All ranks get the same flags. But a path may hold other content on another node, and
    --dtype auto depends on the GPU.
    """
    settings_by_rank = all_gather(settings)
    expected = settings_by_rank[0]
    for rank, settings_of_rank in enumerate(settings_by_rank):
        different = []
        for name in settings:
            if not flags.same_setting(settings_of_rank.get(name), expected.get(name)):
                different.append(name)
        if different:
            raise UserError(
                f"{', '.join(different)} of rank {rank} is not that of rank 0: "
                "use the same files and flags on every node"
            )


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _move_aside(checkpoints: list[Path]) -> None:
    for path in checkpoints:
        files.move(path, path.with_name(f"broken-{path.name}-{time.time_ns()}"))
