"""common/generate.py, common/inference.py and the cache arguments of common/model.py: against the whole text read anew,
against transformers' generate, and against the plain definitions of what is drawn."""

import argparse
from dataclasses import replace

import pytest
import torch
from support.checkpoints import write_folder
from support.harness import ODD, TINY, config_of

from old import cli, inference, model
from old.exits import UserError
from old.generate import Generated, Sampler, StaticCache, generate, pad, probabilities

CPU = torch.device("cpu")
GREEDY = Sampler()
PROMPT_LENGTHS = (3, 11, 1, 7)
SHAPES = {
    "tiny": config_of(TINY),
    "odd": config_of(ODD),
    "all heads": config_of({**ODD, "num_key_value_heads": 6}),
    "one key-value head, tied": config_of({**ODD, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "wide heads": config_of({**ODD, "head_dim": 10}),
}
each_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def net_of(config, seed: int = 3) -> model.Transformer:
    """Random weights four times as large as a new model's: its logits differ by more than rounding."""
    net = model.build("nano", config, seed=seed)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    return net.eval()


def prompts_of(config, lengths=PROMPT_LENGTHS, seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def cache_for(config, batch: int, length: int) -> StaticCache:
    return StaticCache(config, batch=batch, length=length, dtype=torch.float32, device=CPU)


def run_generate(net, prompts: list[list[int]], new_tokens: int, sampler: Sampler = GREEDY, **more) -> Generated:
    cache = cache_for(net.config, len(prompts), max(map(len, prompts)) + new_tokens)

    def prefill(ids, positions, last):
        return net(ids, positions=positions, cache=cache, last=last)

    def decode(ids, positions):
        return net(ids[:, None], positions=positions[:, None], cache=cache)[:, -1]

    return generate(prefill, decode, prompts, max_new_tokens=new_tokens, sampler=sampler, device=CPU, **more)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# --- the cache


@each_shape
@pytest.mark.parametrize("chunks", [(13,), (1,) * 13, (5, 7, 1), (1, 12)], ids=str)
@torch.no_grad()
def test_cached_logits_are_those_of_the_whole_text(config, chunks):
    net = net_of(config)
    ids = torch.tensor(prompts_of(config, (13, 13)))
    expected = net(ids)
    cache = cache_for(config, 2, 17)
    found, start = [], 0
    for size in chunks:
        positions = torch.arange(start, start + size).expand(2, -1)
        found.append(net(ids[:, start : start + size], positions=positions, cache=cache))
        start += size
    assert relative_error(torch.cat(found, dim=1), expected) <= 1e-5


@each_shape
@torch.no_grad()
def test_rows_of_unequal_length_see_their_own_text_alone(config):
    """Padding on the right, and then each row at a position of its own."""
    net, prompts = net_of(config), prompts_of(config)
    following = prompts_of(config, (1,) * len(prompts), seed=6)
    cache = cache_for(config, len(prompts), 13)
    ids, lengths = pad(prompts, CPU)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    first = net(ids, positions=positions, cache=cache, last=lengths - 1)
    second = net(torch.tensor(following), positions=lengths[:, None], cache=cache)[:, 0]
    for row, (prompt, more) in enumerate(zip(prompts, following, strict=True)):
        expected = net(torch.tensor([prompt + more]))[0]
        assert relative_error(first[row], expected[-2]) <= 1e-5
        assert relative_error(second[row], expected[-1]) <= 1e-5


@torch.no_grad()
def test_stale_slots_are_never_seen():
    """As after rejected drafts: go back four tokens and on with others."""
    config = SHAPES["odd"]
    net = net_of(config)
    text, rejected = prompts_of(config, (12, 4))
    cache = cache_for(config, 1, 20)
    for start, ids in ((0, text[:7]), (7, rejected), (7, text[7:])):
        positions = torch.arange(start, start + len(ids))[None]
        found = net(torch.tensor([ids]), positions=positions, cache=cache)
    assert relative_error(found, net(torch.tensor([text]))[:, 7:]) <= 1e-5


@torch.no_grad()
def test_a_token_sees_none_after_it():
    config = SHAPES["odd"]
    net = net_of(config)
    (text,) = prompts_of(config, (9,))
    other = [*text[:6], *((token + 1) % config.vocab_size for token in text[6:])]
    positions = torch.arange(9)[None]
    logits = [net(torch.tensor([ids]), positions=positions, cache=cache_for(config, 1, 9)) for ids in (text, other)]
    assert torch.equal(logits[0][:, :6], logits[1][:, :6])
    assert not torch.equal(logits[0][:, 6], logits[1][:, 6])


def test_the_bytes_of_a_cache():
    config = SHAPES["odd"]
    cache = cache_for(config, 5, 13)
    assert cache.nbytes() == 2 * config.num_hidden_layers * 5 * 13 * config.num_key_value_heads * config.head_dim * 4
    assert StaticCache(config, batch=5, length=13, dtype=torch.bfloat16, device=CPU).nbytes() * 2 == cache.nbytes()


def test_a_stage_caches_its_layers_and_a_rank_its_heads():
    config = SHAPES["odd"]
    part = StaticCache(config, batch=2, length=8, dtype=torch.float32, device=CPU, layers=["1", "2"], ranks=3)
    assert list(part.keys) == list(part.values) == ["1", "2"]
    assert part.keys["1"].shape == (2, 1, 8, config.head_dim)


@torch.no_grad()
def test_logits_of_the_last_token_alone():
    config = SHAPES["odd"]
    net, (ids, lengths) = net_of(config), pad(prompts_of(config), CPU)
    last = net(ids, last=lengths - 1)
    assert last.shape == (len(PROMPT_LENGTHS), config.vocab_size)
    assert relative_error(last, net(ids)[torch.arange(len(lengths)), lengths - 1]) <= 1e-6


# --- the loop


@each_shape
def test_greedy_tokens_are_those_of_transformers(tmp_path, config):
    """A batch of unequal prompts here, each alone there."""
    from transformers import LlamaForCausalLM

    write_folder(tmp_path / "model", config, seed=4)
    net = model.build(str(tmp_path / "model"), config, seed=9)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    prompts = prompts_of(config)
    found = run_generate(net, prompts, 17).token_ids
    for prompt, tokens in zip(prompts, found, strict=True):
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=17, do_sample=False, pad_token_id=0)
        assert tokens == out[0, len(prompt) :].tolist()
    assert len({tuple(tokens) for tokens in found}) > 1


def test_a_batch_of_unequal_prompts_is_that_of_transformers(tmp_path):
    """Their way for batches, padding on the left and an attention mask, gives the same tokens."""
    from transformers import LlamaForCausalLM

    config = SHAPES["odd"]
    write_folder(tmp_path / "model", config, seed=4)
    net = model.build(str(tmp_path / "model"), config, seed=9)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    prompts = prompts_of(config)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = theirs.generate(padded, attention_mask=mask, max_new_tokens=17, do_sample=False, pad_token_id=0)
    assert run_generate(net, prompts, 17).token_ids == out[:, longest:].tolist()


def test_a_row_is_the_same_alone_and_in_a_batch():
    net = net_of(SHAPES["odd"])
    prompts = prompts_of(net.config)
    together = run_generate(net, prompts, 13).token_ids
    assert together == [run_generate(net, [prompt], 13).token_ids[0] for prompt in prompts]
    assert together[::-1] == run_generate(net, prompts[::-1], 13).token_ids


def scripted(answers: list[list[int]], vocabulary: int = 32):
    """prefill and decode of a model that says these answers whatever it reads, and what was asked of it."""
    asked = []

    def says(step: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([answer[step] for answer in answers]), vocabulary).float()

    def prefill(ids, positions, last):
        asked.append((ids.tolist(), positions.tolist(), last.tolist()))
        return says(0)

    def decode(ids, positions):
        asked.append((ids.tolist(), positions.tolist()))
        return says(len(asked) - 1)

    return prefill, decode, asked


def test_a_row_ends_at_its_stop_token_and_the_loop_with_the_last_row():
    prefill, decode, asked = scripted([[5, 6, 9, 7, 1], [9, 5, 5, 5, 1], [5, 5, 5, 8, 1]])
    seen = []
    result = generate(
        prefill,
        decode,
        [[1, 2, 3], [1], [4, 4]],
        max_new_tokens=5,
        sampler=GREEDY,
        device=CPU,
        stop=frozenset({8, 9}),
        on_tokens=seen.append,
    )
    assert result.token_ids == [[5, 6], [], [5, 5, 5]]
    assert seen == [[5, None, 5], [6, None, 5], [None, None, 5], [None, None, None]]
    assert (result.prompt_tokens, result.decode_steps, result.decoded_tokens) == (6, 3, 3)
    assert result.finished == {0, 1, 2}
    assert asked[0] == ([[1, 2, 3], [1, 0, 0], [4, 4, 0]], [[0, 1, 2]] * 3, [2, 0, 1])
    assert asked[1:] == [([5, 9, 5], [3, 1, 2]), ([6, 5, 5], [4, 2, 3]), ([9, 5, 5], [5, 3, 4])]


def test_one_new_token_takes_no_decode_step():
    prefill, decode, asked = scripted([[5], [6]])
    result = generate(prefill, decode, [[1], [2]], max_new_tokens=1, sampler=GREEDY, device=CPU)
    assert result.token_ids == [[5], [6]]
    assert (len(asked), result.decode_steps, result.decoded_tokens, result.finished) == (1, 0, 0, set())


# --- what is drawn


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Token by token, in doubles. Of equal tokens the first are the likelier ones."""
    scores = torch.tensor(logits, dtype=torch.float64) / temperature
    if top_k:
        worst = sorted(scores.tolist(), reverse=True)[: max(top_k, 1)][-1]
        scores[scores < worst] = -torch.inf
    chances = scores.softmax(-1).tolist()
    kept, together = [], 0.0
    for token in sorted(range(len(chances)), key=lambda token: -chances[token]):
        if top_p == 1 or together < top_p:
            kept.append(token)
        together += chances[token]
    total = sum(chances[token] for token in kept)
    return torch.tensor([chances[token] / total if token in kept else 0.0 for token in range(len(chances))])


WAYS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 0.7, "top_k": 23},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.4, "top_p": 0.35},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.8},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_probabilities_are_as_defined_and_as_in_transformers(way):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(4, 23, generator=torch.Generator().manual_seed(1)) * 3
    found = probabilities(logits, **way)
    full = {"top_k": 0, "top_p": 1.0, **way}
    expected = torch.stack([by_definition(row.tolist(), **full) for row in logits]).float()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(found > 0, expected > 0)

    warped = TemperatureLogitsWarper(full["temperature"])(None, logits)
    if full["top_k"]:
        warped = TopKLogitsWarper(full["top_k"])(None, warped)
    if full["top_p"] < 1:
        warped = TopPLogitsWarper(full["top_p"])(None, warped)
    torch.testing.assert_close(found, warped.softmax(-1), atol=1e-6, rtol=1e-5)


def test_equal_tokens():
    """top_k keeps all that are as likely as the last one kept. top_p keeps as few as reach the share."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -5.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert (probabilities(logits, temperature=1.0, top_k=2) > 0).sum(-1).tolist() == [4, 5]
    assert (probabilities(logits, temperature=1.0, top_p=0.5) > 0).sum(-1).tolist() == [2, 3]
    torch.testing.assert_close(probabilities(logits, temperature=1.0, top_p=0.5)[1].max(), torch.tensor(1 / 3))


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-40])
def test_no_temperature_leaves_the_likeliest(temperature):
    logits = torch.tensor([[[1.0, 3.0, 2.9], [0.0, -1.0, -2.0]]])
    expected = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    assert torch.equal(probabilities(logits, temperature=temperature, top_k=2, top_p=0.9), expected)


def test_probabilities_of_bf16_logits_are_fp32():
    logits = torch.randn(2, 4099, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = probabilities(logits, temperature=0.8, top_p=0.95)
    assert found.dtype == torch.float32
    assert torch.equal(found, probabilities(logits.float(), temperature=0.8, top_p=0.95))


def test_a_seed_gives_the_same_tokens():
    net = net_of(SHAPES["odd"])
    prompts = prompts_of(net.config)

    def sampled(seed: int) -> list[list[int]]:
        sampler = Sampler(0.9, 50, 0.95, torch.Generator().manual_seed(seed))
        return run_generate(net, prompts, 13, sampler).token_ids

    assert sampled(1) == sampled(1) != sampled(2)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """Chi-square with a fixed seed: 20.1 is exceeded once in 100 seeds with 8 degrees of freedom."""
    logits = torch.linspace(-1.5, 2, 12)
    sampler = Sampler(1.3, 9, 1.0, torch.Generator().manual_seed(0))
    expected = by_definition(logits.tolist(), 1.3, 9, 1.0) * 20_000
    counts = torch.bincount(sampler(logits.expand(20_000, -1)), minlength=12)
    assert counts[:3].tolist() == [0, 0, 0]
    assert ((counts - expected)[3:] ** 2 / expected[3:]).sum() < 20.1


def test_greedy_takes_the_likeliest_and_no_random_number():
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    assert Sampler(0.0, 3, 0.5, generator)(torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 0.0]])).tolist() == [1, 0]
    assert torch.equal(generator.get_state(), state)


# --- text


def words(folder, special: dict, template: str | None = None):
    """A tokenizer of whole words in a Hugging Face folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", "<|eot_id|>", "a", "b", "user", ":"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    hf.chat_template = template
    hf.save_pretrained(folder)


def byte_text(config=SHAPES["tiny"], model_name: str = "nano") -> inference.Text:
    return inference.Text(model_name, None, config)


def test_bytes_there_and_back():
    text = byte_text()
    ids = text.encode("naïve", chat=False, max_new_tokens=8)
    assert ids == list("naïve".encode())
    assert text.decode(ids) == "naïve"
    assert text.decode([104, 105, 0xE2]) == "hi\N{REPLACEMENT CHARACTER}"
    assert inference.Text("llama-1b", None, replace(SHAPES["tiny"], vocab_size=300)).decode([104, 299]) == "h?"
    assert text.stop == frozenset()


def test_a_byte_that_is_no_text_is_a_token_all_the_same():
    """As a terminal passes it on that is not set to UTF-8."""
    assert byte_text().encode("a\udce9", chat=False, max_new_tokens=1) == [97, 0xE9]


TURN = "{{ m.role }} : {{ m.content }} </s> "
TEMPLATE = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}b :{% endif %}"


def test_the_tokenizer_of_the_folder(tmp_path):
    write_folder(tmp_path / "model", SHAPES["tiny"])
    words(tmp_path / "model", {"eos_token": "</s>", "unk_token": "<unk>"}, TEMPLATE)
    text = inference.Text(str(tmp_path / "model"), None, SHAPES["tiny"])
    assert text.encode("a b a", chat=False, max_new_tokens=8) == [4, 5, 4]
    assert text.encode("a b", chat=True, max_new_tokens=8) == [6, 7, 4, 5, 1, 5, 7]
    assert text.decode([4, 5, 1]) == "a b"
    assert text.stop == {1, 3}


def test_the_end_is_a_stop_token_where_it_also_stands_for_the_unknown(tmp_path):
    """As in GPT-2's tokenizer and in many since."""
    words(tmp_path / "model", {"eos_token": "</s>", "unk_token": "</s>"})
    assert inference.Text("nano", str(tmp_path / "model"), SHAPES["tiny"]).stop == {1, 3}


def encode_nothing(folder) -> None:
    """A tokenizer that makes no token of white space."""
    words(folder / "tokenizer", {"eos_token": "</s>", "unk_token": "<unk>"})
    inference.Text("nano", str(folder / "tokenizer"), SHAPES["tiny"]).encode("  ", chat=False, max_new_tokens=1)


def load_larger(folder) -> None:
    words(folder / "tokenizer", {"eos_token": "</s>", "unk_token": "<unk>"})
    inference.Text("nano", str(folder / "tokenizer"), replace(SHAPES["tiny"], vocab_size=7))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda _: byte_text().encode("", chat=False, max_new_tokens=1), "an empty prompt"),
        (encode_nothing, "a prompt without a token"),
        (lambda _: byte_text().encode("a", chat=True, max_new_tokens=1), "--chat: the tokenizer has no chat template"),
        (lambda _: byte_text(SHAPES["odd"]).encode("😀", chat=False, max_new_tokens=1), "the model knows 211"),
        (lambda _: byte_text().encode("a" * 100, chat=False, max_new_tokens=29), "at most 28 new tokens fit"),
        (
            lambda _: byte_text().encode("a" * 200, chat=False, max_new_tokens=1),
            "shorten the prompt by 73 tokens or more",
        ),
        (load_larger, "has 8 tokens, the model 7"),
        (lambda _: inference.Text("nano", "/nowhere", SHAPES["tiny"]), "--tokenizer /nowhere"),
    ],
)
def test_text_that_cannot_be(tmp_path, wrong, told):
    with pytest.raises(UserError) as error:
        wrong(tmp_path)
    assert told in str(error.value)


def test_guesses_need_room_behind_the_last_new_token():
    text = byte_text()
    assert len(text.encode("0123456789", chat=False, max_new_tokens=114, draft_tokens=4)) == 10
    with pytest.raises(UserError, match=r"--max-new-tokens 115 with --draft-tokens 4 .* at most 114 new tokens fit"):
        text.encode("0123456789", chat=False, max_new_tokens=115, draft_tokens=4)


def test_a_prompt_may_fill_the_context_to_the_last_token():
    """The last new token is not read again, and still counts: nobody has to know why one fewer would fit."""
    assert len(byte_text().encode("a" * 100, chat=False, max_new_tokens=28)) == 100


def test_prompts_of_flag_and_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  \ntwo words\n")
    assert inference.read_prompts(prompt=None, file=file) == ["one", "two words"]
    assert inference.read_prompts(prompt="", file=None) == [""]
    assert inference.read_prompts(prompt=None, file=None) == [inference.QUESTION]


def test_prompts_that_cannot_be(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe\xff")
    for prompt, file in ((None, empty), (None, binary), (None, tmp_path), ("a", empty)):
        with pytest.raises(UserError, match="--prompts"):
            inference.read_prompts(prompt=prompt, file=file)


def test_choosing_among_what_is_drawn_wants_something_drawn():
    inference.check_drawing(temperature=0.5, top_k=3, top_p=0.5)
    inference.check_drawing(temperature=0, top_k=0, top_p=1)
    for flags in ({"top_k": 3, "top_p": 1.0}, {"top_k": 0, "top_p": 0.5}):
        with pytest.raises(UserError, match="nothing is drawn"):
            inference.check_drawing(temperature=0, **flags)


def test_the_ends_of_a_generation_config(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert inference.Text(str(tmp_path), None, config_of(TINY)).stop == {7, 9}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert inference.Text(str(tmp_path), None, config_of(TINY)).stop == {8}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        inference.Text(str(tmp_path), None, config_of(TINY))
    for wrong in ('{"a": 1}', '"7"', "[7, null]"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(UserError, match=r"generation_config\.json: its eos_token_id .* is no token"):
            inference.Text(str(tmp_path), None, config_of(TINY))


def test_a_share_is_above_nothing_and_at_most_all():
    assert [cli.share("0.5"), cli.share("1")] == [0.5, 1]
    for wrong in ("0", "1.01", "-1", "nan", "x"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli.share(wrong)


def test_a_stream_has_whole_characters_only():
    written = []
    on_tokens = inference.stream_to(written.append, byte_text())
    for byte in "aé€😀b".encode():
        on_tokens([byte, 0])
    on_tokens([None, 65])
    assert written == ["a", "é", "€", "😀", "b"]


def test_a_stream_goes_on_after_bytes_that_are_no_character():
    written = []
    on_tokens = inference.stream_to(written.append, byte_text())
    for byte in (0x61, 0xFF, 0xE2, 0x62):
        on_tokens([byte])
    assert "".join(written) == b"a\xff\xe2b".decode(errors="replace")


# --- the figures


def test_the_figures_of_a_run(monkeypatch):
    monkeypatch.setattr(inference, "read_bandwidth", lambda device, nbytes: 40_000.0)
    result = Generated([[104, 105, 33], [106]], 11, 0.5, 2.0, 4, weight_reads=8, decoded_tokens=2)
    figures = inference.speed(result, byte_text(), device=CPU, bytes_per_step=5_000)
    assert figures == {
        "token_ids": [[104, 105, 33], [106]],
        "texts": ["hi!", "j"],
        "prompt_tokens": 11,
        "new_tokens": 4,
        "time_to_first_token_seconds": 0.5,
        "prefill_tokens_per_second": 22.0,
        "decode_tokens_per_second": 1.0,
        "weight_bytes_read_per_second": 20_000.0,
        "read_bandwidth_bytes_per_second": 40_000.0,
        "bandwidth_share": 0.5,
    }


def test_no_decode_step_has_no_speed():
    figures = inference.speed(Generated([[104]], 3, 0.5), byte_text(), device=CPU, bytes_per_step=1 << 20)
    assert figures["decode_tokens_per_second"] is figures["bandwidth_share"] is None
    assert figures["weight_bytes_read_per_second"] is None
    assert figures["read_bandwidth_bytes_per_second"] > 0
