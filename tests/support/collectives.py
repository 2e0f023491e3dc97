"""A prelude for training scripts: what each micro-batch says to other ranks."""

# Three forwards with their backwards where --micro-batch-size is given, else one. A mode for each, as torch wants it.
COUNTS = """
import itertools, json, os, sys
from torch.distributed.tensor.debug import CommDebugMode
from common import data
owner, name = (data.Batches, "stream") if hasattr(data, "Batches") else (data, "train_batches")
made = getattr(owner, name)
micro_batches = 3 if "--micro-batch-size" in sys.argv else 1

def counted(*args, **kwargs):
    batches, counts = made(*args, **kwargs), []
    for batch in itertools.islice(batches, micro_batches):
        mode = CommDebugMode()
        with mode:
            yield batch
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
    with open(f"counts-{os.environ['RANK']}.json", "w") as file:
        json.dump(counts, file)
    yield from batches

setattr(owner, name, counted)
"""
