"""09_inference: where an answer ends if the tokenizer alone says so."""

import pytest
from support.checkpoints import write_folder
from support.harness import TINY, config_of, run


def test_the_stop_token_may_also_stand_for_the_unknown(tmp_path):
    """As GPT-2's does. A prompt with a word that the tokenizer does not know has it inside, and is answered."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    write_folder(tmp_path / "model", config_of(TINY), scale=4)
    (tmp_path / "prompts.txt").write_text("w3 w1 w4\nw3 unheard w4\n", encoding="utf-8")
    flags = (
        "--model",
        "model",
        "--prompts",
        "prompts.txt",
        "--max-new-tokens",
        12,
        "--device",
        "cpu",
    )

    def answers(stop: int) -> list[list[int]]:
        words = {f"w{token}": token for token in range(TINY["vocab_size"])}
        known = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=f"w{stop}"))
        known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=known, unk_token=f"w{stop}", eos_token=f"w{stop}"
        )
        tokenizer.save_pretrained(tmp_path / "model")
        result = run("09_inference/infer_70b.py", tmp_path, *flags, "--json", "summary.json")
        assert result.code == 0, result  # it compares the tokens with those of transformers
        return result.summary["token_ids"]

    whole, _ = answers(stop=2)
    assert len(whole) == 12
    stop = whole[4]
    ended, after_unknown = answers(stop)
    assert ended == whole[: whole.index(stop)]
    assert stop not in after_unknown
