"""Train your own model with 05_ddp/train.py: any causal language model of transformers.

It needs a function `load_training_objects`, which replaces that of train.py. Checkpoints, resume,
evaluation, MFU and the flags work as in train.py. The model is a small GPT-2 with
random weights. To train a pretrained model, replace `from_config` by `from_pretrained`.

    laptop    torchrun --standalone --nproc_per_node=2 05_ddp/own_gpt2.py
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/own_gpt2.py \
                  --global-batch-size 512 --compile

What to look at: in fp32 the loss does not depend on the number of ranks.
"""

import torch
import torch.nn.functional as F
import train  # 05_ddp/train.py, which also makes `import lm` work
from torch import nn

from common import exits
from lm import data, shapes
from training.batches import PADDING, Batches
from training.training_objects import TrainingObjects


class CausalLM(nn.Module):
    """A model of transformers that returns its loss, as train.py expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids, targets, reduction="mean"):
        # lm.data has moved the targets one token ahead, so transformers' own loss does not fit.
        logits = self.model(input_ids, use_cache=False).logits  # [batch, tokens, vocab]
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=PADDING,
            reduction=reduction,
        )


def load_training_objects(args, rank, world_size, device):
    """Return the model, on `device`, the batches of this rank, and what must match on resume."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes.use_recipe(args)  # of --model, whose defaults this model has
    corpus = data.load_corpus(args.data, args.tokenizer)
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    batches = Batches(train_set, held_out_set, args, rank=rank, world_size=world_size)

    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=corpus.vocab_size,
        n_positions=args.seq_len,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        # Dropout draws other numbers for each number of ranks. Without it the losses are equal.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = CausalLM(AutoModelForCausalLM.from_config(config)).to(device)

    # The FLOPs of lm/shapes.py. An embedding is looked up: only the head multiplies by its weights.
    multiplied = sum(parameter.numel() for parameter in model.parameters())
    head = model.model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is not head.weight:
            multiplied -= module.weight.numel()
    attention_flops = 12 * config.n_layer * config.n_embd * args.seq_len
    return TrainingObjects(
        model=model,
        batches=batches,
        name="own GPT-2",
        must_match={"data": corpus.sha256, "model": config.to_json_string()},
        flops_per_token=6 * multiplied + attention_flops,
    )


if __name__ == "__main__":
    train.load_training_objects = load_training_objects
    exits.run(train.main)
