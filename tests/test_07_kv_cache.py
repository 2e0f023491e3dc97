"""07_memory_tricks/kv_cache.py: blocks against rows, requests that come and go against each alone, away and back."""

import json

import pytest
import torch
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import ODD, TINY, config_of, run

from old import model, shapes
from old.generate import StaticCache

measure = load("07_memory_tricks/_kv_cache_measure.py")
offload = load("07_memory_tricks/_kv_cache_offload.py")
making = load("07_memory_tricks/_kv_cache_requests.py")
size = load("07_memory_tricks/_kv_cache_size.py")
kv_cache = load("07_memory_tricks/kv_cache.py")

SCRIPT = "07_memory_tricks/kv_cache.py"
CPU = torch.device("cpu")
CONFIG = config_of(ODD)
Request = making.Request


@pytest.fixture(scope="module")
def net() -> model.Transformer:
    return model.build("nano", CONFIG, seed=3).eval()


def paged(blocks: int, config: shapes.Config = CONFIG) -> "kv_cache.PagedCache":
    return kv_cache.PagedCache(config, blocks=blocks, dtype=torch.float32, device=CPU)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests_of(*sizes: tuple[int, int, int], shared: int = 0) -> list:
    """(prompt, new tokens, arrival) of each; their prompts begin with the same `shared` tokens."""
    return [
        Request(key, tokens(shared, 99) + tokens(prompt, key), new_tokens, arrival)
        for key, (prompt, new_tokens, arrival) in enumerate(sizes)
    ]


def assert_as_alone(net, requests: list) -> None:
    for request in requests:
        assert len(request.ids) == len(request.prompt) + request.new_tokens
        alone = kv_cache.without_cache(net, request.prompt, request.new_tokens)
        assert request.ids[len(request.prompt) :] == alone.argmax(-1).tolist()
        measure.check_same(torch.stack(request.logits), alone)


# --- one text


@pytest.mark.parametrize(("prompt", "new_tokens"), [(1, 1), (1, 40), (15, 2), (16, 17), (33, 31)])
def test_a_cache_in_a_row_and_in_blocks_is_none_at_all(net, prompt, new_tokens):
    text = tokens(prompt)
    expected = kv_cache.without_cache(net, text, new_tokens)
    assert expected.shape == (new_tokens, CONFIG.vocab_size)
    row = StaticCache(CONFIG, batch=1, length=64, dtype=torch.float32, device=CPU)
    blocks = paged(7)
    blocks.free = [3, 0, 6, 5, 1]  # not in order
    assert blocks.reserve(8, prompt + new_tokens)
    blocks.select([8])
    for cache in (row, blocks):
        measure.check_same(kv_cache.with_cache(net, cache, text, new_tokens), expected)


def test_without_a_cache_is_the_whole_text_read_anew(net):
    text = tokens(9)
    logits = kv_cache.without_cache(net, text, 3)
    with torch.no_grad():
        for row in logits:
            torch.testing.assert_close(row, net(torch.tensor([text]))[0, -1], atol=1e-6, rtol=1e-5)
            text = [*text, row.argmax().item()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_sees_other_logits_and_other_tokens(dtype):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert measure.check_same(logits, logits) == {"equal_tokens": 6, "logits_relative_error": 0.0}
    with pytest.raises(AssertionError, match="apart"):
        measure.check_same(logits * 1.1, logits)
    with pytest.raises(AssertionError):
        measure.check_same(logits[:5], logits)
    other = logits.clone()
    other[3, other[3].argmax()] = -9
    with pytest.raises(AssertionError):
        measure.check_same(other, logits)


def test_in_16_bits_two_likely_tokens_may_change_places():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[2, 7], logits[2, 8] = 5, 5 + 2**-5
    found = logits.clone()
    found[2, 7], found[2, 8] = 5 + 2**-5, 5
    found[3:] = 0  # another text from there on
    same = measure.check_same(found, logits)
    assert same["equal_tokens"] == 2
    assert 0 < same["logits_relative_error"] < 0.01
    with pytest.raises(AssertionError, match="new token 3 of 6"):
        measure.check_same(found.float(), logits.float())


# --- blocks


def test_a_table_grows_by_blocks_and_gives_them_back():
    cache = paged(5)
    assert cache.keys["0"].shape == (5, 16, CONFIG.num_key_value_heads, CONFIG.head_dim)
    assert cache.reserve(1, 16)
    assert len(cache.tables[1]) == 1
    assert cache.reserve(1, 17)
    assert cache.reserve(1, 17)
    assert cache.reserve(2, 33)
    assert (len(cache.tables[1]), len(cache.tables[2]), cache.free) == (2, 3, [])
    assert sorted(cache.tables[1] + cache.tables[2]) == [0, 1, 2, 3, 4]
    assert not cache.reserve(1, 33)
    assert cache.reserve(1, 32)
    given_back = list(cache.tables[2])
    cache.release(2)
    assert cache.free == given_back
    assert not cache.reserve(1, 16 * 5 + 1)
    assert (len(cache.tables[1]), len(cache.free)) == (2, 3)  # nothing was done


def test_shared_blocks_are_free_when_the_last_one_leaves():
    cache = paged(6)
    cache.reserve(0, 40)
    cache.share(1, 0, 40)
    cache.share(2, 0, 31)
    assert cache.tables[1] == cache.tables[0][:2]  # the third is not full: its owner goes on writing to it
    assert cache.tables[2] == cache.tables[0][:1]
    cache.reserve(1, 40)
    assert cache.tables[1][2] != cache.tables[0][2]
    cache.release(0)
    assert len(cache.free) == 6 - 3
    cache.release(1)
    assert len(cache.free) == 6 - 1
    cache.release(2)
    assert sorted(cache.free) == [0, 1, 2, 3, 4, 5]
    assert cache.users == [0] * 6


# --- requests that come and go

SIZES = ((5, 9, 0), (20, 1, 0), (1, 30, 0), (17, 4, 3), (8, 16, 4), (2, 2, 50))


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_request_gets_the_tokens_that_it_gets_alone(net, continuous, rows):
    requests, cache = requests_of(*SIZES), paged(12)
    served = kv_cache.serve(net, cache, requests, rows=rows, continuous=continuous)
    assert_as_alone(net, requests)
    assert sorted(cache.free) == list(range(12))
    assert served.prompt_tokens_read == sum(prompt for prompt, _, _ in SIZES)
    assert served.preemptions == 0


def test_continuous_batching_fills_a_row_as_soon_as_it_is_free(net):
    """Prefill gives the first token, and each step one more: 9, 2 and 4 new tokens are 8, 1 and 3 steps."""
    sizes = ((4, 9, 0), (4, 2, 0), (4, 4, 0))
    steps = {}
    for continuous in (True, False):
        served = kv_cache.serve(net, paged(12), requests_of(*sizes), rows=2, continuous=continuous)
        steps[continuous] = served.steps
        assert len(served.slots_filled) == served.steps
    assert steps == {True: 8, False: 8 + 3}


def test_nobody_is_answered_before_it_comes(net):
    served = kv_cache.serve(net, paged(8), requests_of((4, 3, 0), (4, 3, 7)), rows=2, continuous=True)
    assert served.steps == 7 + 2
    assert len(served.slots_filled) == 4


@pytest.mark.parametrize("continuous", [True, False])
def test_who_gives_up_its_blocks_goes_on_with_the_same_tokens(net, continuous):
    """Three that need three blocks each, and four there are."""
    requests, cache = requests_of((14, 30, 0), (15, 30, 0), (13, 30, 0)), paged(4)
    served = kv_cache.serve(net, cache, requests, rows=3, continuous=continuous)
    assert served.preemptions > 0
    assert served.prompt_tokens_read > 14 + 15 + 13
    assert max(served.slots_reserved) == 64
    assert_as_alone(net, requests)
    assert len(cache.free) == 4


def test_a_request_that_never_fits_is_seen_at_once(net):
    with pytest.raises(AssertionError):
        kv_cache.serve(net, paged(2), requests_of((20, 20, 0)), rows=1, continuous=True)


@pytest.mark.parametrize("length", [1, 16, 20, 33])
def test_a_system_prompt_is_read_once(net, length):
    requests, cache = requests_of(*SIZES[:4], shared=length), paged(16)
    system = Request(-1, tokens(length, 99), 0)
    served = kv_cache.serve(net, cache, requests, rows=3, continuous=True, system=system)
    assert_as_alone(net, requests)
    full = length // 16 * 16
    assert served.prompt_tokens_read == length + sum(prompt + length - full for prompt, *_ in SIZES[:4])
    assert len(cache.free) == 16 - kv_cache.blocks_for(length)  # it stays for the next ones


def test_a_prompt_that_is_the_system_prompt_is_read_for_its_last_token(net):
    requests = [Request(0, tokens(32, 99), 5)]
    system = Request(-1, tokens(32, 99), 0)
    served = kv_cache.serve(net, paged(8), requests, rows=1, continuous=True, system=system)
    assert served.prompt_tokens_read == 32 + 16
    assert_as_alone(net, requests)


def test_slots_are_counted_once_and_only_with_tokens_that_are_read():
    cache, served = paged(8), making.Served()
    long, short = requests_of((19, 9, 0), (3, 1, 0))
    cache.reserve(0, 20)
    cache.share(1, 0, 16)
    cache.reserve(1, 20)
    long.take(5, torch.zeros(1))
    served.note(cache, [long], 16)
    assert (served.slots_filled, served.slots_reserved) == ([19], [32])
    short.take(5, torch.zeros(1))
    assert short.ended
    cache.tables[1] = cache.tables[1][1:]
    served.note(cache, [long, short], 16)  # it has ended: its block is taken for nothing
    assert (served.slots_filled[1], served.slots_reserved[1]) == (19, 48)


def test_the_requests_fit_and_differ():
    args = kv_cache_args(seq_len=57, requests=200, concurrency=3, seed=4)
    system, requests = making.make_requests(args, 211)
    assert len(system.prompt) == 14
    assert all(request.prompt[:14] == system.prompt for request in requests)
    lengths = [len(request.prompt) + request.new_tokens for request in requests]
    assert max(lengths) <= 57
    assert len({len(request.prompt) for request in requests}) == 14
    assert len({request.new_tokens for request in requests}) > 15
    assert [request.arrival for request in requests][:6] == [0, 0, 0, 0, 4, 8]
    assert max(max(request.prompt) for request in requests) == 210


def kv_cache_args(**given):
    from argparse import Namespace

    return Namespace(**given)


# --- away and back


@torch.inference_mode()
def test_a_conversation_that_was_away_goes_on(net):
    text, stranger = tokens(45), tokens(60, 1)
    cache = paged(7)
    offload.read(net, cache, 0, text[:37], 0)
    before = list(cache.tables[0])
    away = offload.send_away(cache, 0, 37)
    assert len(cache.free) == 7
    assert away.nbytes() == 2 * CONFIG.num_hidden_layers * 3 * 16 * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    offload.read(net, cache, 1, stranger, 0)
    offload.bring_back(cache, 0, away)
    assert set(before) & set(cache.tables[1])
    found = offload.read(net, cache, 0, text[37:], 37)
    measure.check_same(found, net(torch.tensor([text]))[:, -1])


def test_the_measured_conversation(net):
    def new_cache(blocks: int):
        return paged(blocks)

    row = offload.measure_offload(net, new_cache, tokens(11), 45, kv_cache.BLOCK, CPU, 2)
    assert row["moved_bytes"] == 2 * CONFIG.num_hidden_layers * 48 * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    assert row["equal_tokens"] == 1
    assert row["logits_relative_error"] <= 1e-5
    assert [row[f"{kind}_seconds"]["n"] for kind in ("away", "back", "read_again")] == [2, 2, 2]


# --- size


def test_a_70b_cache_is_what_its_shape_gives():
    sizes = size.check_sizes("odd", CONFIG, seq_len=40, concurrency=3, dtype=torch.float32, device=CPU)
    seventy = next(row for row in sizes["named"] if row["model"] == "llama-70b")
    assert seventy["bytes_per_token"] == 2 * 80 * 8 * 128 * 2 == 327_680
    assert seventy["all_heads_bytes_per_token"] == 8 * 327_680
    assert seventy["many_requests_bytes"] == 32 * 8192 * 327_680
    assert sizes["allocated"][-1] == {"tokens": 40, "concurrency": 3, "cache_bytes": 2 * 3 * 3 * 40 * 3 * 6 * 4}
    assert sizes["allocated"][0] == {"tokens": 10, "concurrency": 1, "cache_bytes": 2 * 3 * 1 * 10 * 3 * 6 * 4}
    room = sizes["llama_70b_tokens_beside_them"]
    assert 35e9 < sizes["llama_70b_int4_weight_bytes"] < 40e9
    assert room["80 GB"] - room["48 GB"] == pytest.approx(32e9 / 327_680, abs=1)


@pytest.mark.parametrize("key_value_heads", [1, 2, 3, 6])
def test_grouped_heads_keep_one_key_and_give_the_same_logits(key_value_heads):
    config = config_of({**ODD, "num_key_value_heads": key_value_heads})
    found = size.check_grouped(config, seq_len=40, seed=1, device=CPU, with_cache=kv_cache.with_cache)
    assert found["key_value_heads"] == (1 if key_value_heads == 6 else key_value_heads)
    assert found["all_heads_cache_bytes"] == found["cache_bytes"] * 6 // found["key_value_heads"]
    assert (found["equal_tokens"], found["new_tokens"]) == (10, 10)


# --- the script


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    where = tmp_path_factory.mktemp("run")
    write_folder(where / "model", config_of(TINY))
    flags = ["--model", "model", "--seq-len", 65, "--requests", 7, "--concurrency", 3, "--seed", 2]
    done = run(SCRIPT, where, *flags, "--device", "cpu", "--plot", "s.png", "--json", "summary.json", warm=False)
    assert done.code == 0, done.err[-3000:]
    return done


def test_the_script_proves_what_it_says(result):
    lines = [line for line in result.out.splitlines() if line.startswith("checked:")]
    assert len(lines) == 5
    first, continuous, reused = result.summary["serving"]
    for row in (first, continuous, reused):
        assert row["equal_tokens"] == row["new_tokens"] == result.summary["tokens"]
        assert row["logits_relative_error"] <= 1e-5
        assert 0 < row["slots_filled_mean"] <= row["slots_reserved_mean"] <= row["slots_reserved_most"]
    assert continuous["steps"] < first["steps"]
    assert reused["prompt_tokens_read"] < continuous["prompt_tokens_read"]
    assert result.summary["static_cache_slots"] == 3 * 80
    assert continuous["slots_reserved_most"] <= 120
    none, static, blocks = result.summary["one_text"]
    assert none["tokens_read"] > static["tokens_read"] == blocks["tokens_read"]
    assert (result.folder / "s.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_has_what_every_summary_has(result):
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["script"] == SCRIPT
    assert summary["parameters"] == shapes.parameter_count(config_of(TINY))
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 1e6
    assert (summary["dtype"], summary["device"]) == ("fp32", "cpu")


def test_in_bf16_it_tells_how_many_tokens_are_equal(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    flags = ["--model", "tiny.json", "--seq-len", 48, "--requests", 3, "--concurrency", 2, "--dtype", "bf16"]
    done = run(SCRIPT, tmp_path, *flags, "--device", "cpu", "--plot", "s.png", "--json", "summary.json")
    assert done.code == 0, done.err[-3000:]
    assert done.summary["dtype"] == "bf16"
    assert done.summary["sizes"]["allocated"][-1]["cache_bytes"] == 2 * 2 * 2 * 48 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["--seq-len", "31"], "--seq-len 31"),
        (["--seq-len", "1025"], "1024"),
        (["--requests", "0"], "--requests"),
        (["--concurrency", "-1"], "--concurrency"),
        (["--model", "nowhere"], "--model nowhere"),
        (["--dtype", "int8"], "--dtype"),
    ],
)
def test_bad_flags_take_one_line(tmp_path, bad, named):
    done = run(SCRIPT, tmp_path, *bad)
    assert done.code == 2
    assert named in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.gpu(n=1)
def test_on_a_gpu(tmp_path, gpus):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    for dtype in ("fp32", "bf16"):
        flags = ["--device", "cuda", "--dtype", dtype, "--json", "summary.json", "--plot", "s.png"]
        done = run(SCRIPT, tmp_path, *flags, warm=False, **visible)
        assert done.code == 0, done.err[-3000:]
        assert done.summary["offload"]["to"] == "pinned CPU memory"
        for row in done.summary["serving"]:
            assert row["equal_tokens"] == row["new_tokens"] or dtype == "bf16"
