"""Train your own model with 05_ddp/train.py: an image classifier.

It needs a function `load_training_objects`, which replaces that of train.py. Checkpoints, resume,
evaluation, MFU and the flags work as in train.py. The images are generated: each
class has a pattern of its own, and noise covers it. Use any torch Dataset in their place.

    laptop    torchrun --standalone --nproc_per_node=2 05_ddp/own_images.py \
                  --global-batch-size 48 --lr 1e-3
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/own_images.py \
                  --global-batch-size 4096 --compile

What to look at: the loss falls from 2.3, which is guessing among ten classes. It does not depend on
the number of ranks. In the output, "tokens" are images.
"""

import torch
import torch.nn.functional as F
import train  # 05_ddp/train.py, which also makes `import lm` work
from torch import nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from common import exits
from training.batches import PADDING, Batches
from training.training_objects import TrainingObjects

CLASSES = 10


class Images(Dataset):
    """Generated images, each a pair (image [3, 32, 32], class [])."""

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.patterns = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        generator = torch.Generator().manual_seed(self.first + i)
        noise = torch.randn(3, 32, 32, generator=generator)
        label = i % CLASSES
        return 0.2 * self.patterns[label] + noise, torch.tensor(label)


class Classifier(nn.Module):
    """A small convolutional network that returns its loss, as train.py expects."""

    def __init__(self) -> None:
        super().__init__()
        # GroupNorm, because BatchNorm's results depend on how many images a rank reads at once.
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(8, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, CLASSES),
        )

    def forward(self, images, labels, reduction="mean"):
        """Return the loss of images [batch, 3, 32, 32] with labels [batch]."""
        logits = self.network(images).float()
        return F.cross_entropy(logits, labels, ignore_index=PADDING, reduction=reduction)


def load_training_objects(args, rank, world_size, device):
    """Return the model, on `device`, the batches of this rank, and what must match on resume."""
    train_set = Images(first=0, count=5000)
    held_out_set = Images(first=5000, count=100)
    batches = Batches(train_set, held_out_set, args, rank=rank, world_size=world_size)

    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = Classifier().to(device)
    image, label = train_set[0]
    with FlopCounterMode(display=False) as counter:
        model(image[None].to(device), label[None].to(device))

    return TrainingObjects(
        model=model,
        batches=batches,
        name="own classifier",
        must_match={"data": "5,000 generated images", "model": str(model)},
        flops_per_token=3 * counter.get_total_flops(),  # backward takes twice as many as forward
    )


if __name__ == "__main__":
    train.load_training_objects = load_training_objects
    exits.run(train.main)
