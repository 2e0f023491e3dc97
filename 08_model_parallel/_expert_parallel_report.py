"""The reporting side of expert_parallel.py: tables, and whether what the script teaches holds."""

import argparse
import time

import torch
import torch.distributed as dist

from old import hardware, report, runtime

TOLERANCE = 1e-5


def relative_difference(found: list, expected: list) -> float:
    found, expected = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    return ((found - expected).abs() / expected.abs()).max().item()


def name_of(proof: dict) -> str:
    return "dropless" if proof["capacity_factor"] is None else f"capacity factor {proof['capacity_factor']:g}"


def check_proof(proof: dict) -> None:
    """Equal to one process, and every choice, call and byte as it must be."""
    name = name_of(proof)
    for step, (kept, expected) in enumerate(zip(proof["kept"], proof["expected_kept"], strict=True), start=1):
        assert kept == expected, f"{name}, step {step}: the experts took other tokens than on one process"
    for calls in proof["calls_per_rank"]:
        assert calls == proof["expected_calls"], f"{name}: {calls}, and must be {proof['expected_calls']}"
    sent, must_send = proof["all_to_all_bytes_per_rank"], proof["expected_all_to_all_bytes_per_rank"]
    assert sent == must_send, f"{name}: the ranks sent {sent} bytes, and must send {must_send}"
    differences = {
        "losses": relative_difference(proof["losses"], proof["expected_losses"]),
        "gradient norms": relative_difference(proof["norms"], proof["expected_norms"]),
        "gradients": proof["gradient_relative_difference"],
    }
    for what, difference in differences.items():
        assert difference <= TOLERANCE, (
            f"{name}: {what} differ from one process by {difference:.1g}: that is no rounding"
        )
    told = ", ".join(f"{what} {difference:.1g}" for what, difference in differences.items())
    print(f"checked: {name}, {len(proof['losses'])} steps as on one process (tolerance {TOLERANCE:g}): {told}")


def check_routings(routings: list[dict], choices: int, held: list[int], k: int) -> None:
    """Every choice is computed or dropped, and a skewed router leaves nothing to ranks without the first k experts."""
    for row in routings:
        found = sum(row["rows_by_rank"]) + row["dropped"]
        assert found == choices, f"{row['routing']}: {found} choices are computed or dropped, and must be {choices}"
    *_, skewed, _ = routings
    of_first_experts = [max(0, min(k - sum(held[:rank]), count)) for rank, count in enumerate(held)]
    expected = [choices // k * count for count in of_first_experts]
    assert skewed["rows_by_rank"] == expected, f"skewed: {skewed['rows_by_rank']} rows, and must be {expected}"
    print(f"checked: under each router all {choices:,} choices of a step are computed or dropped, each on its own rank")


def proof_table(proofs: list[dict], clip_norm: float) -> str:
    lines = [
        ["experts take", "clipped steps", "choices dropped, by rank", "all-to-alls", "sent to other ranks, by rank"]
    ]
    for proof in proofs:
        lines.append(
            [
                name_of(proof),
                f"{sum(norm > clip_norm for norm in proof['norms'])} of {len(proof['norms'])}",
                told(proof["dropped_by_rank"]),
                f"{proof['calls_per_rank'][0]['all_to_alls']:,}",
                mebibytes(proof["all_to_all_bytes_per_rank"]),
            ]
        )
    return report.table(lines)


def told(numbers: list[int]) -> str:
    return " + ".join(f"{number:,}" for number in numbers)


def mebibytes(sizes: list[int]) -> str:
    return " + ".join(f"{size / 2**20:.2f}" for size in sizes) + " MiB"


def routing_table(rows: list[dict]) -> str:
    lines = [["routing", "rows on each rank", "dropped", "sent to other ranks", "step, median", "min - max"]]
    for row in rows:
        step = row["step_seconds"]
        lines.append(
            [
                row["routing"],
                told(row["rows_by_rank"]),
                f"{row['dropped']:,}",
                mebibytes(row["all_to_all_bytes_per_rank"]),
                f"{step['median'] * 1e3:.1f} ms",
                f"{step['min'] * 1e3:.1f} - {step['max'] * 1e3:.1f} ms",
            ]
        )
    return report.table(lines)


def balance_table(rows: list[dict]) -> str:
    lines = [["the batch in", "balance loss", "routers' gradient, relative difference"]]
    for row in rows:
        where = "one part" if row["parts"] == 1 else f"{row['parts']} parts"
        lines.append([where, f"{row['balance_loss']:.4f}", f"{row['gradient_relative_difference']:.1%}"])
    return report.table(lines)


def training_table(trainings: list[dict]) -> str:
    lines = [["balance loss", "layer", "share of each expert, %", "largest / even", "cross-entropy"]]
    for training in trainings:
        shares = training["last_shares"]
        layer = max(range(len(shares)), key=lambda layer: max(shares[layer]))
        lines.append(
            [
                f"weight {training['balance_weight']:g}",
                str(layer),
                " ".join(f"{share * 100:.0f}" for share in shares[layer]),
                f"{max(shares[layer]) * len(shares[layer]):.2f}",
                f"{training['cross_entropies'][0]:.3f} to {training['cross_entropies'][-1]:.3f}",
            ]
        )
    return report.table(lines)


def conclude(
    args: argparse.Namespace,
    proofs: list[dict],
    routings: list[dict],
    balance: list[dict],
    trainings: list[dict],
    parameters: int,
    device: torch.device,
    began: float,
) -> None:
    """Say what was measured, then whether what the script teaches holds."""
    if not runtime.is_rank0():
        return
    world_size = dist.get_world_size()
    print(
        f"{args.model}: {parameters:,} parameters in fp32, {args.experts} experts in each block, {args.top_k} for each "
        f"token, {world_size} rank(s)\n"
    )
    print(
        f"The {len(proofs[0]['losses'])} steps of the proof. Over capacity, tokens of the last ranks are dropped first:"
    )
    print(proof_table(proofs, args.clip_norm))
    print("\nForward and backward of a step. A row is a token on its way to one of its experts:")
    print(routing_table(routings))
    print("\nThe balance loss of one batch, as a whole and as the mean of its parts, as if each rank took its own:")
    print(balance_table(balance))
    print(f"\nAt the end of {args.steps} steps of AdamW, the layer whose router is the most uneven:")
    print(training_table(trainings))
    print()
    last = trainings[-1]
    summary = {
        "device": hardware.device_name(device),
        "world_size": world_size,
        "dtype": "fp32",
        "model": args.model,
        "parameters": parameters,
        "steps": args.steps,
        "tokens": args.steps * args.global_batch_size * args.seq_len,
        "first_loss": last["cross_entropies"][0],
        "last_loss": last["cross_entropies"][-1],
        "peak_memory_bytes": report.peak_memory_bytes(device),
        "seconds": time.perf_counter() - began,
        "experts": args.experts,
        "top_k": args.top_k,
        "proofs": proofs,
        "routings": routings,
        "balance": balance,
        "trainings": trainings,
    }
    report.write_json(summary, args.json)
    for proof in proofs:
        check_proof(proof)
    layers = len(last["last_shares"])
    choices_per_step = args.global_batch_size * args.seq_len * args.top_k * layers
    check_routings(routings, choices_per_step, proofs[0]["held"], args.top_k)
