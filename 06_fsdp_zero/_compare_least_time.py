"""The least time that a step can take on given machines, from what compare.py has counted."""

import json
from dataclasses import dataclass
from pathlib import Path

from _compare_count import Counts, Kind

from old import hardware, shapes
from old.exits import UserError

ADAMW_BYTES = 28  # per weight: in fp32, weight, gradient and two moments are read; weight and moments are written
# Of the nodes that most H100 are in: a 400 Gbit/s adapter per GPU (DGX and HGX H100), and 18 lanes of NVLink, 25 GB/s
# each in one direction.
BETWEEN_NODES, WITHIN_NODE = 50.0, 450.0  # GB/s that a rank can send


@dataclass
class Machine:
    """What a rank runs on; None: not known."""

    name: str
    flops: float | None  # per second, in --dtype
    memory_rate: float | None  # bytes per second
    memory_bytes: float | None
    link_rates: tuple[float, float] | None  # bytes per second of a rank's adapter to other nodes, and within its node
    link_fits: dict[str, tuple[float, float]] | None  # instead, by the name of a count: latency and such a rate

    def links_for_people(self) -> str:
        if self.link_fits:
            return "links as 05_ddp/collectives.py measured them"
        if self.link_rates:
            return "per rank {:g} GB/s between nodes, {:g} within".format(*(rate / 1e9 for rate in self.link_rates))
        return "links not known: see --link"


def describe_machine(name: str, dtype: str, gbps: tuple[float, float] | None, fits: dict | None) -> Machine:
    """The data sheet's figures for that device, and the links' as given."""
    sheet = hardware.peak(name)
    return Machine(
        name=name,
        flops=hardware.peak_flops(name, dtype),
        memory_rate=sheet.bandwidth if sheet else None,
        memory_bytes=sheet.memory if sheet else None,
        link_rates=(gbps[0] * 1e9, gbps[1] * 1e9) if gbps else None,
        link_fits=fits,
    )


def read_fits(file: Path) -> dict[str, tuple[float, float]]:
    """By the name of a count: latency in seconds, and the bytes per second that a rank then sent."""
    try:
        measured = json.loads(file.read_text())
        n = measured["world_size"]
        if n < 2:
            raise ValueError(f"{n} rank")
        found = {}
        for name, trips in (("all-reduce", 2), ("reduce-scatter", 1), ("all-gather", 1)):
            line = measured["fits"][name]
            if line is None:
                raise UserError(f"--link-fit {file} has no line for {name}: measure up to more --max-bytes")
            # of the whole buffer's size, of which a rank sends (n - 1) / n in each trip
            rate = line["beta_bytes_per_second"] * trips * (n - 1) / n
            found[f"{name.replace('-', '_')}s"] = (line["alpha_seconds"], rate)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--link-fit {file} is not what 05_ddp/collectives.py --json writes on two ranks or more ({error!r})"
        ) from None
    return found


def parse_links(text: str) -> tuple[float, float]:
    """50, or 50,450: GB/s between nodes, and within one."""
    rates = [float(part) for part in text.split(",")]
    if len(rates) not in (1, 2) or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(text)  # argparse tells
    return rates[0], rates[-1]


parse_links.__name__ = "GBPS or GBPS,GBPS"  # as argparse calls it


def least_seconds(counts: Counts, machine: Machine, job) -> dict[str, float | None]:
    """Of a step: products, links, AdamW's update, and the step, as if products and links hid one another."""
    compute = links = update = None
    if machine.flops:
        flops = shapes.flops_per_token(job.config, job.seq_len)
        if job.recompute:  # the forward of the blocks again, a third of forward and backward; the head is not in them
            flops += (flops - 6 * job.config.vocab_size * job.config.hidden_size) / 3
        compute = job.micro_batch_size * job.seq_len * flops / machine.flops
    if machine.link_rates or machine.link_fits or not counts.traffic.calls:
        links = sum(link_seconds(kind, counts, machine) for kind in counts.traffic.calls)
    if machine.memory_rate:
        updated_weights = counts.optimizer_bytes / 8  # two moments of 4 bytes each
        update = updated_weights * ADAMW_BYTES / machine.memory_rate
    step = None if None in (compute, links, update) else max(compute, links) + update
    return {"compute": compute, "links": links, "update": update, "step": step}


def link_seconds(kind: Kind, counts: Counts, machine: Machine) -> float:
    if machine.link_fits:
        latency, rate = machine.link_fits[kind.name]
    else:
        latency = 0.0
        between, within = machine.link_rates
        rate = within
        if kind.ranks > kind.ranks_per_node:
            # The ring enters and leaves a node once. Cut into as many rings as there are ranks, it uses all adapters.
            rate = min(within, between * kind.ranks_per_node)
    return counts.traffic.calls[kind] * latency + float(counts.traffic.bytes_sent(kind)) / rate
