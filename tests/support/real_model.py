"""What transformers makes of models/smollm2-135m: the answers that our scripts are held against."""

from pathlib import Path


def answers_of_transformers(folder: Path, questions: list[str], new_tokens: int) -> list[list[int]]:
    """Its greedy answer to each question in the chat template, in fp32, without the token that ends it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert net.dtype == torch.float32
    found = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        words = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        asked = words["input_ids"].shape[1]
        answer = net.generate(**words, do_sample=False, max_new_tokens=new_tokens)[
            0, asked:
        ].tolist()
        found.append([token for token in answer if token != tokenizer.eos_token_id])
    return found
