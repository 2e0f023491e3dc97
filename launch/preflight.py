"""Check all nodes of a job, and the links between them, before training. Name the bad node.

One node whose network card has fallen back to a tenth of its speed makes each step of all nodes ten
times as long, and nothing fails. So each node runs 01_devices/doctor.py first. Then the nodes
measure all-reduces in pairs, in up to three rounds, each time with another partner:

    round 1    node0-node3   node1-node2
    round 2    node0-node2   node1-node3
    round 3    node0-node1   node2-node3

If node2 is bad, all of its pairs are slow, and every other node has a pair that is not.

Run this on each node in place of torchrun, with the same arguments. It takes --nnodes, --node-rank,
--master-addr, --master-port and --nproc-per-node of torchrun, and --run-dir of the script. It
ignores all others:

    python launch/preflight.py --nnodes=4 --node-rank=0 --master-addr=node0 --master-port=29400 \\
        --nproc-per-node=8 --run-dir=/shared/run

The exit code is the same on all nodes: 0 if training may start, 1 if a node or a link is bad, 2 for
a wrong setting. Node 0 prints the bad nodes, with the flag of sbatch that leaves them out. The port
is free again afterwards. If the same nodes have passed within the hour, with the same --run-dir, as
before a requeue, only the nodes' names are compared. train.sbatch deletes preflight.json from this
folder after a failure, for a node may have broken. Without Slurm, delete it by hand. A check of GPU
nodes is expected to take less than a minute.

launch/torchrun/multi_node.sh, and so train.sbatch, runs this if there are several nodes.
PREFLIGHT=0 leaves it out.

A pair is slow if it is below MIN_BUS_GB_PER_S (an environment variable, in GB/s as nccl-tests
defines bus bandwidth), or below half of the fastest pair. Set it: of two nodes there is one pair,
and nothing to compare it with. JOIN_TIMEOUT_SECONDS (300) is how long to wait for all nodes.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import torch.distributed as dist

from common import cli, files, report

ROOT = Path(__file__).resolve().parents[1]
DOCTOR_SECONDS = 120
PAIR_SECONDS = 60  # of all processes of a pair, with their start
ROUNDS = 3
SLOW_SHARE = 0.5  # of the fastest pair
VALID_SECONDS = 3600
SHOWN_PAIRS = 10
STAMP = "preflight.json"  # in the folder of the run: the nodes that have passed, and when


class Meeting:
    """The nodes of the job. They exchange values through a store, which node 0 hosts."""

    def __init__(self, args: argparse.Namespace, seconds: float) -> None:
        self.node = args.node_rank
        self.count = args.nnodes
        try:
            self.store = dist.TCPStore(
                args.master_addr,
                args.master_port,
                is_master=self.node == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )
        except RuntimeError as error:
            raise exits.UserError(
                f"--master-addr={args.master_addr} --master-port={args.master_port}: node 0 cannot "
                f"listen there, or does not answer within {seconds:.0f} s ({error})"
            ) from None

    def exchange(self, topic: str, value: object, seconds: float) -> list:
        """Return the values of all nodes. It is None for a node that gives none in this time."""
        self.store.set(f"{topic}/{self.node}", json.dumps(value))
        deadline = time.monotonic() + seconds
        values = []
        for node in range(self.count):
            left = max(1.0, deadline - time.monotonic())
            values.append(self._wait(f"{topic}/{node}", left))
        return values

    def _wait(self, key: str, seconds: float) -> object:
        try:
            self.store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return None
        return json.loads(self.store.get(key))

    def leave(self) -> None:
        """Wait until node 0 has printed its report. Node 0 waits until nobody needs the store.

        A launcher may kill all nodes as soon as one of them has failed.
        """
        if self.node > 0:
            self._wait("left/0", 30)
        self.store.set(f"left/{self.node}", "true")
        if self.node == 0:
            for node in range(1, self.count):
                self._wait(f"left/{node}", 5)


# --- the nodes


def examine_node(run_dir: Path | None) -> list[str]:
    """Run doctor.py on this node. Return what failed, a line for each check."""
    # Without the port of this program, and what torchrun reads: doctor.py runs one of its own.
    environment = {}
    for name, value in os.environ.items():
        if name != "MASTER_PORT" and not name.startswith("PET_"):
            environment[name] = value
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "doctor.json"
        argv = [sys.executable, ROOT / "01_devices/doctor.py", "--json", summary]
        argv += ["--run-dir", run_dir or "runs"]
        code, output = run([list(map(str, argv))], [environment], DOCTOR_SECONDS)
        if not summary.exists():
            return [f"doctor.py: {output or code}"]
        checks = json.loads(summary.read_text(encoding="utf-8"))["checks"]
    failures = []
    for check in checks:
        if check["result"] == "fail":
            failures.append(f"{check['check']}: {check['seen']} ({check['fix']})")
    return failures


def run(commands: list[list[str]], environments: list[dict], seconds: float) -> tuple[bool, str]:
    """Run commands at the same time. Return whether all succeeded, and the last line of the first.

    Kill what still runs after so many seconds.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        processes = []
        for command, environment in zip(commands, environments, strict=True):
            target = subprocess.DEVNULL if processes else output
            processes.append(
                subprocess.Popen(command, env=environment, stdout=target, stderr=target)
            )
        deadline = time.monotonic() + seconds
        in_time = True
        for process in processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                in_time = False
                process.kill()
                # A process that waits for a broken driver does not die of it.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
        if not in_time:
            return False, f"no answer in {seconds:.0f} s"
        output.seek(0)
        lines = output.read().split("\n")
    codes = [process.returncode for process in processes]
    written = [line for line in lines if line.strip()]
    return not any(codes), written[-1] if written else f"exit codes {codes}"


# --- the links


def pair_nodes(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round. No two rounds have the same pair.

    This is the circle method of tournaments: the first seat is fixed, and the others move on.
    """
    seats: list[int | None] = list(range(count))
    if count % 2:
        seats.append(None)  # whoever sits opposite has a break
    rounds = []
    for _ in range(min(ROUNDS, len(seats) - 1)):
        pairs = []
        half = len(seats) // 2
        for first, second in zip(seats[:half], reversed(seats[half:]), strict=True):
            if first is not None and second is not None:
                pairs.append((min(first, second), max(first, second)))
        rounds.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure_pair(args: argparse.Namespace, pair: tuple[int, int]) -> dict:
    """Run this node's processes of a pair. Return the pair with its bus bandwidth or its error."""
    count = args.nproc_per_node
    first_rank = 0 if args.node_rank == pair[0] else count
    environments = []
    for local_rank in range(count):
        ranks = {"RANK": first_rank + local_rank, "WORLD_SIZE": 2 * count, "LOCAL_RANK": local_rank}
        store = {"MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port}
        named = {name: str(value) for name, value in (ranks | store).items()}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | named
        environment.pop("NCCL_DEBUG", None)  # the last line is the rate
        environments.append(environment)
    command = [sys.executable, str(ROOT / "launch/_preflight_pair.py"), f"{pair[0]}-{pair[1]}"]
    ok, output = run([command] * count, environments, PAIR_SECONDS)
    rate = float(output) if ok and args.node_rank == pair[0] else 0.0
    return {"pair": pair, "gb_per_s": rate, "error": None if ok else output}


def measure_links(args: argparse.Namespace, meeting: Meeting) -> list[dict]:
    """Measure the pairs of all rounds. Return a dict for each. Every node must call this."""
    measured = {}
    for number, pairs in enumerate(pair_nodes(meeting.count), 1):
        own = None
        for pair in pairs:
            if meeting.node in pair:
                own = measure_pair(args, pair)
        # A round begins when all pairs of the last one have ended. 10 s: to start processes
        for result in meeting.exchange(f"round {number}", own, PAIR_SECONDS + 10):
            if result is None:  # a break, or no answer
                continue
            pair = tuple(result["pair"])
            other = measured.setdefault(pair, result)
            other["gb_per_s"] = max(other["gb_per_s"], result["gb_per_s"])
            other["error"] = other["error"] or result["error"]
        for pair in pairs:
            measured.setdefault(pair, {"pair": pair, "gb_per_s": 0.0, "error": "no answer"})
    return list(measured.values())


def find_slow(measured: list[dict], least_gb_per_s: float, count: int) -> tuple[list, list[int]]:
    """Return the slow pairs, and the nodes all of whose pairs are slow."""
    fastest = max((link["gb_per_s"] for link in measured), default=0.0)
    limit = max(least_gb_per_s, SLOW_SHARE * fastest)
    slow = []
    for link in measured:
        if link["error"] or link["gb_per_s"] < limit:
            slow.append(link)
    bad = []
    for node in range(count):
        pairs = [link for link in measured if node in link["pair"]]
        if pairs and all(link in slow for link in pairs):
            bad.append(node)
    return slow, bad


# --- the report


def describe_links(measured: list[dict], names: list[str]) -> str:
    """Return a table of the slowest pairs."""
    rows = [["slowest pairs", "bus GB/s"]]
    for link in sorted(measured, key=lambda link: link["gb_per_s"])[:SHOWN_PAIRS]:
        first, second = link["pair"]
        rate = link["error"] or f"{link['gb_per_s']:.3g}"
        rows.append([f"{names[first]} {names[second]}", rate])
    return report.table(rows)


def describe_bad(slow: list[dict], bad: list[int], names: list[str]) -> list[str]:
    """Return a line for each bad node, or for the slow pairs if no node explains them."""
    if not bad:
        links = ", ".join(f"{names[link['pair'][0]]}-{names[link['pair'][1]]}" for link in slow)
        return [f"slow pairs ({links}), but no node has only such: look at the switches"]
    lines = [f"{names[node]}: all of its pairs are slow" for node in bad]
    if len(names) == 2:
        lines.append("with two nodes, one of them or the link may be bad: try each with a third")
    return lines


def print_result(args: argparse.Namespace, problems: list[str], seconds: float) -> None:
    """Print the problems on node 0, and elsewhere where to find them."""
    if problems and args.node_rank > 0:
        problems = [f"see what node 0 ({args.master_addr}) printed"]
    for problem in problems:
        print(f"preflight: error: {problem}", file=sys.stderr, flush=True)
    if args.node_rank == 0 and not problems:
        print(f"preflight: {args.nnodes} nodes are fit, {seconds:.0f} s", flush=True)


def last_passed(run_dir: Path | None) -> list[str]:
    """Return the names of the nodes that have passed within the hour, or an empty list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stamp = json.loads((run_dir / STAMP).read_text(encoding="utf-8"))
        if 0 <= time.time() - stamp["time"] < VALID_SECONDS:
            return stamp["nodes"]
    return []


def note_passed(run_dir: Path | None, names: list[str]) -> None:
    """Write the names of the nodes, and the time, to the folder of the run."""
    if run_dir is not None:
        with contextlib.suppress(OSError):  # the training says what is wrong there
            run_dir.mkdir(parents=True, exist_ok=True)
            files.write_json(run_dir / STAMP, {"nodes": names, "time": time.time()})


def parse_flags() -> argparse.Namespace:
    """Return the settings of this program. Other flags are torchrun's or the script's."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--nnodes", type=cli.positive_int, required=True)
    add("--node-rank", "--node_rank", type=cli.natural, required=True)
    add("--master-addr", "--master_addr", required=True, metavar="HOST", help="of node 0")
    add("--master-port", "--master_port", type=cli.natural, required=True)
    add("--nproc-per-node", "--nproc_per_node", type=cli.positive_int, default=1)
    add("--run-dir", type=Path, help="the folder of the run, which all nodes see")
    args, _ = parser.parse_known_args()
    if args.node_rank >= args.nnodes:
        raise exits.UserError(f"--node-rank {args.node_rank}: the last node is {args.nnodes - 1}")
    args.least_gb_per_s = cli.environment_number("MIN_BUS_GB_PER_S", cli.positive, "1e-9")
    args.join_seconds = cli.environment_number("JOIN_TIMEOUT_SECONDS", cli.positive, "300")
    return args


def check_nodes(args: argparse.Namespace, meeting: Meeting, names: list[str]) -> list[str]:
    """Check nodes and links. Return a line for each problem. Every node must call this."""
    problems = []
    failures_by_node = meeting.exchange("doctor", examine_node(args.run_dir), DOCTOR_SECONDS + 10)
    bad = []
    for node, failures in enumerate(failures_by_node):
        if failures is None:
            failures = [f"no answer in {DOCTOR_SECONDS + 10} s"]
        if failures:
            bad.append(node)
        problems += [f"{names[node]}: {failure}" for failure in failures]
    if not bad:
        measured = measure_links(args, meeting)
        slow, bad = find_slow(measured, args.least_gb_per_s, meeting.count)
        if meeting.node == 0 and measured:
            print(describe_links(measured, names), flush=True)
        if slow:
            problems = describe_bad(slow, bad, names)
    if bad:
        problems.append(f"Slurm: sbatch --exclude={','.join(names[node] for node in bad)}")
    return problems


def main() -> int:
    args = parse_flags()
    join = args.join_seconds
    meeting = Meeting(args, join)
    start = time.monotonic()
    try:
        own = {
            "name": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "passed": last_passed(args.run_dir),
        }
        nodes = meeting.exchange("name", own, join)
        if None in nodes:
            problems = [f"node {nodes.index(None)} did not come within {join:.0f} s"]
        else:
            problems = []
            names = [node["name"] for node in nodes]
            if not set(names) <= set(nodes[0]["passed"]):  # node 0 decides for all
                problems = check_nodes(args, meeting, names)
                if not problems and args.node_rank == 0:
                    note_passed(args.run_dir, names)
        print_result(args, problems, time.monotonic() - start)
        meeting.leave()
    except RuntimeError as error:  # of the store
        raise exits.UserError(f"node 0 ({args.master_addr}) is gone: {error}") from None
    return exits.FAILURE_EXIT_CODE if problems else 0


if __name__ == "__main__":
    exits.run(main)
