"""training/trackers.py: loss.png, TensorBoard and Weights & Biases show what metrics.jsonl says."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from support.harness import (
    ROOT,
    Result,
    assert_refused,
    drop_after,
    in_full,
    in_long,
    run,
    tiny_flags,
    train,
    with_prelude,
    write_tiny,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.meter import Meter, read_records
from training.trackers import CHARTS

DDP = "05_ddp/train.py"
TRAIN_3D = "08_model_parallel/train_3d.py"
TRAIN_ZERO = "06_fsdp_zero/train_zero.py"
FINETUNE = "06_fsdp_zero/finetune.py"
PAIRS = ROOT / "07_memory_tricks/lora_instructions.jsonl"

# The training scripts, and flags of their own. A new script joins the tests by a line here.
SCRIPTS = [
    (DDP, ()),
    in_long("06_fsdp_zero/train_fsdp.py", ()),
    in_long(TRAIN_3D, ()),
    in_full(TRAIN_ZERO, ()),
    in_full(FINETUNE, ("--data", PAIRS, "--seq-len", 128, "--adapters", 0)),
]
SHOWN = {"WANDB_MODE": "offline", "DRAW_LOSS": "1"}
BOTH = ("--tensorboard", "--wandb", "--save-every", 2, "--eval-every", 2)


def numbers(records: list[dict]) -> dict[str, dict[int, float]]:
    """Return the numbers of records by name and step, as TensorBoard keeps them."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, {})[record["step"]] = value
    return found


def numbers_in_tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard shows of a run."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        found[name] = {point.step: point.value for point in points}
        assert len(found[name]) == len(points), f"{name} has a step twice"
    return found


def assert_tensorboard_shows(folder: Path) -> None:
    """Each number has a chart in a section, and loss and held-out loss have the same one."""
    expected = numbers(read_records(folder / "metrics.jsonl"))
    shown = numbers_in_tensorboard(folder)
    assert {"loss/train", "loss/held-out", "speed/tokens_per_second"} <= shown.keys()
    assert shown.keys() == {CHARTS[name] for name in expected}
    for name, points in expected.items():
        assert shown[CHARTS[name]] == pytest.approx(points, rel=1e-6), name


def assert_is_picture(file: Path) -> None:
    with Image.open(file) as image:
        assert image.format == "PNG"
        image.load()  # all of it
        colors = image.convert("RGB").getcolors(maxcolors=2**24)
    assert len(colors) > 2, "axes and curves"


def wandb_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def interrupted(script: str, folder: Path, more: tuple) -> Result:
    """Train 6 steps, as a kill would have left them that came after the checkpoint of step 4."""
    result = train(script, folder, "--steps", 6, *BOTH, *more, nproc=2, **SHOWN)
    drop_after(folder, 4)
    return result


@pytest.mark.parametrize(("script", "more"), SCRIPTS)
def test_a_run_and_its_resume_are_shown(tmp_path, script, more):
    interrupted(script, tmp_path, more)
    folder = tmp_path / "run"
    assert_tensorboard_shows(folder)
    assert_is_picture(folder / "loss.png")
    first_picture = (folder / "loss.png").read_bytes()
    (first,) = wandb_runs(folder)

    flags = ("--steps", 8, *BOTH, *more, "--resume")
    result = train(script, tmp_path, *flags, nproc=2, **SHOWN)
    assert [record["step"] for record in result.records if "loss" in record] == [*range(1, 9)]
    assert_tensorboard_shows(folder)
    assert_is_picture(folder / "loss.png")
    assert (folder / "loss.png").read_bytes() != first_picture
    assert not list(folder.glob("loss.png?*")), "no temporary file is left"

    (second,) = [file for file in wandb_runs(folder) if file != first]
    assert second.name == first.name, "the same run of W&B"
    content = second.read_bytes()
    for record in result.records:
        if "loss" in record and record["step"] > 4:
            assert repr(record["loss"]).encode() in content
    assert b"loss/train" in content


def test_tensorboard_that_is_switched_on_later_shows_the_whole_run(tmp_path):
    train(DDP, tmp_path, "--steps", 4)
    train(DDP, tmp_path, "--steps", 6, "--resume", "--tensorboard")
    assert_tensorboard_shows(tmp_path / "run")


@pytest.mark.parametrize(("package", "nproc"), [("tensorboard", None), ("wandb", 2)])
def test_a_missing_package_is_one_line_before_the_work_starts(tmp_path, package, nproc):
    write_tiny(tmp_path)
    script = with_prelude(DDP, tmp_path, f"sys.modules[{package!r}] = None")
    result = run(script, tmp_path, *tiny_flags(tmp_path), f"--{package}", nproc=nproc)
    assert_refused(result, f"pip install {package}")
    assert not (tmp_path / "run").exists()


def test_a_person_who_cannot_log_at_wandb_gets_one_line(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    login = {"WANDB_API_KEY": "", "HOME": str(home)}
    write_tiny(tmp_path)
    for mode, word in (("online", "wandb login"), ("of-line", "of-line")):
        environment = {**login, "WANDB_MODE": mode}
        result = run(DDP, tmp_path, *tiny_flags(tmp_path), "--wandb", **environment)
        assert result.code == 2, result
        assert word in result.err
        assert "Traceback" not in result.err


def test_a_picture_that_cannot_be_written_does_not_end_the_run(tmp_path):
    train(DDP, tmp_path, "--steps", 2)
    (tmp_path / "run/loss.png").unlink()
    (tmp_path / "run/loss.png").mkdir()
    flags = ("--steps", 4, "--save-every", 2, "--resume")
    result = train(DDP, tmp_path, *flags, DRAW_LOSS="1")
    assert len(result.column("loss")) == 4
    assert "loss.png" in result.out


def meter_in(folder: Path, **more) -> Meter:
    return Meter(
        folder,
        steps=3,
        start_step=0,
        tokens_per_step=1,
        flops_per_token=None,
        peak_flops=None,
        device=torch.device("cpu"),
        dtype="fp32",
        **more,
    )


def test_a_generated_text_is_recorded_and_shown(tmp_path, capfd):
    text = "def main(): >> return 0" + 100 * " and so on"
    meter = meter_in(tmp_path, tensorboard=True)
    meter.log(1, torch.tensor(2.0), torch.tensor(1.0), lr=0.1)
    meter.log_eval(1, 2.5, sample=text)
    meter.log_eval(2, 2.5)
    meter.finish(3, model="mine", parameters=None, json_path=None)

    _, with_text, without = read_records(tmp_path / "metrics.jsonl")
    assert with_text == {"step": 1, "val_loss": 2.5, "sample": text}
    assert without == {"step": 2, "val_loss": 2.5}
    lines = capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if "def main(): >> return 0" in line]
    assert line.startswith("  ")
    assert len(line) <= 80
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (tag,) = events.Tags()["tensors"]
    (event,) = events.Tensors(tag)
    assert event.step == 1
    assert event.tensor_proto.string_val[0].decode() == text
    assert_is_picture(tmp_path / "loss.png")


NOTES_HOW_RUNS_FINISH = """
import wandb
finish = wandb.Run.finish
def noted(self, exit_code=None):
    with open("finished", "a") as file:
        file.write(f"{exit_code} ")
    finish(self, exit_code)
wandb.Run.finish = noted
"""


@pytest.mark.parametrize(
    ("flags", "code"), [in_long((), 0), (("--lr", 1e30, "--clip-norm", "inf"), 2)]
)
def test_wandb_knows_whether_the_run_failed(tmp_path, flags, code):
    script = with_prelude(DDP, tmp_path, NOTES_HOW_RUNS_FINISH)
    train(script, tmp_path, *flags, "--wandb", code=code, WANDB_MODE="offline")
    has_failed = code != 0
    assert (tmp_path / "finished").read_text(encoding="utf-8") == f"{int(has_failed)} "
