"""A model that is built whole, from the meta device, in shards or in stages is one model, to the bit."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.harness import run

from common import model, shapes

UNEVEN = shapes.Config(83, 42, 50, 3, 6, 3, 14, 32)  # nothing that two or three ranks divide


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_the_meta_device_has_nothing_unset(monkeypatch, tied):
    config = dataclasses.replace(UNEVEN, tie_word_embeddings=tied)
    built = model.build("nano", config, seed=5)
    net = model.build("nano", config, seed=5, device="meta")
    assert all(tensor.is_meta for tensor in net.state_dict().values())
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, **more: empty_like(t, **more).fill_(torch.nan))
    model.materialize(net, "nano", seed=5, device="cpu")
    tensors = [*net.named_parameters(), *net.named_buffers()]
    expected = [*built.named_parameters(), *built.named_buffers()]
    assert [name for name, _ in tensors] == [name for name, _ in expected]
    for (name, tensor), (_, wanted) in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, msg=name)
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
    assert sum(p.numel() for p in net.parameters()) == shapes.parameter_count(config)


def test_nothing_is_drawn_from_the_global_generator():
    before = torch.get_rng_state()
    model.build("nano", UNEVEN, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_may_be_given():
    net = model.build("nano", UNEVEN, seed=0)
    tokens = torch.randint(0, 83, (2, 9), generator=torch.Generator().manual_seed(1))
    counted = torch.arange(9).expand(2, 9)
    with torch.no_grad():
        assert torch.equal(net(tokens), net(tokens, positions=counted))
        torch.testing.assert_close(net(tokens), net(tokens, positions=counted + 11))  # only distances count
        assert not torch.allclose(net(tokens), net(tokens, positions=counted * 2))
        rows = net(tokens, positions=torch.stack((counted[0], counted[1] * 2)))
        torch.testing.assert_close(rows[0], net(tokens)[0])
        torch.testing.assert_close(rows[1], net(tokens, positions=counted * 2)[1])


def test_rounding_the_weights_leaves_the_angles_exact():
    net = model.build("nano", UNEVEN, seed=0)
    assert net.model.rope_cos.dtype == torch.float32
    assert net.to(torch.bfloat16).model.rope_cos.dtype == torch.float32
    assert "model.rope_cos" not in net.state_dict()


SHARDED = """
import datetime, json, sys
import torch, torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, {root!r})
from common import checkpoint, model, runtime, shapes
from argparse import Namespace
from pathlib import Path

def training(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return dict(net=net, optimizer=optimizer, scheduler=scheduler, scaler=torch.amp.GradScaler("cpu", enabled=False))

def step(parts, batch):
    loss = parts["net"](*batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parts["net"].parameters(), 0.5)
    parts["optimizer"].step()
    parts["optimizer"].zero_grad()
    return loss.detach(), norm

device = runtime.init_process_group("cpu")
config = shapes.Config(83, 42, 50, 3, 6, 3, 14, 32, tie_word_embeddings={tied})
batch = torch.randint(0, 83, (2, 4, 16), generator=torch.Generator().manual_seed(1))
plain = training(model.build("nano", config, seed=7))
net = model.build("nano", config, seed=7, device="meta")
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
for block in net.model.layers.values():
    fully_shard(block, mesh=mesh)
fully_shard(net, mesh=mesh)
model.materialize(net, "nano", seed=7, device=device)
sharded = training(net)
found = dict(initial=[model.digest(plain["net"]), model.digest(net)])
(loss, norm), (sharded_loss, sharded_norm) = step(plain, batch), step(sharded, batch)
found |= dict(plain=[loss.item(), norm.item()], sharded=[sharded_loss.item(), runtime.whole(sharded_norm).item()])
rows = net.model.layers["0"].mlp.up_proj.weight
found |= dict(rows=runtime.gather(rows.to_local().shape[0]))
trained = model.digest(net)
args = Namespace(run_dir=Path("run"), resume=False, keep=1, async_save={background})
saved = checkpoint.Run(args, settings={{}})
saved.save(1, checkpoint.training_state(1, **sharded), shapes.config_json(config))
saved.wait()
fresh = training(model.build("nano", config, seed=8))
step_of_resume = checkpoint.resume(saved, **fresh)
found |= dict(trained=[trained, model.digest(fresh["net"])], step=step_of_resume)
step(sharded, batch), step(fresh, batch)  # the optimizer's state came along
weights = [runtime.whole(p).detach().flatten() for p in net.parameters()]
others = [p.detach().flatten() for p in fresh["net"].parameters()]
found |= dict(far=(torch.cat(weights) - torch.cat(others)).abs().max().item())
if runtime.is_rank0():
    Path("weights").mkdir()
    save_file({{n: p.detach() for n, p in plain["net"].named_parameters()}}, "weights/model.safetensors")
dist.barrier()
loaded = model.build("nano", config, seed=1, device="meta")
for block in loaded.model.layers.values():
    fully_shard(block, mesh=mesh)
fully_shard(loaded, mesh=mesh)
model.materialize(loaded, "weights", seed=1, device=device)
found |= dict(loaded=[model.digest(plain["net"]), model.digest(loaded)])
if runtime.is_rank0():
    Path("found.json").write_text(json.dumps(found))
runtime.shutdown()
"""


@pytest.mark.parametrize(
    ("n", "tied", "background"), [(1, True, False), (2, False, False), (2, True, True), (3, True, False)]
)
def test_shards_are_the_whole_model(tmp_path, n, tied, background):
    """fully_shard from the meta device: initial weights, digest, loss, gradient norm, a checkpoint and its resume."""
    root = str(Path(__file__).parents[1])
    (tmp_path / "run").mkdir()
    (tmp_path / "sharded.py").write_text(SHARDED.format(root=root, tied=tied, background=background))
    result = run(tmp_path / "sharded.py", tmp_path, nproc=n)
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["initial"][0] == found["initial"][1]
    assert found["sharded"] == pytest.approx(found["plain"], rel=1e-5)
    assert sum(found["rows"]) == 50
    assert max(found["rows"]) == -(-50 // n)
    assert found["trained"][0] == found["trained"][1]
    assert found["step"] == 1
    assert found["far"] < 1e-6
    assert found["loaded"][0] == found["loaded"][1]
