"""Compile lm/matvec.py's kernel for sm_90, and print what the machine code of its loop has.

    python tests/nogpu/matvec_sass.py

It needs Triton, which brings its own assembler, and no GPU. It prints a JSON object for each case.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from lm import matvec

ROWS = 8
WARPS = 4
CASES = [  # bits, rows of activations, columns, group
    (4, 1, 8192, 32),
    (4, 1, 28672, 32),
    (4, 1, 8192, 128),
    (4, 1, 14336, 32),  # the last pass is not full
    (4, 2, 8192, 32),
    (8, 1, 8192, 8192),
    (8, 2, 8192, 8192),
]
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
BRANCH = re.compile(r"\bBRA\b.*?0x([0-9a-f]+)")


def cubin(bits: int, tokens: int, columns: int, group: int) -> bytes:
    """Return the kernel's machine code for sm_90."""
    scales = "*i32" if bits == 4 else "*bf16"
    signature = {"x": "*bf16", "words": "*i32", "scales": scales, "y": "*bf16", "N": "i32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    constants = {"M": tokens, "K": columns, "BITS": bits, "GROUP": group}
    constants |= {"ROWS": ROWS, "THREADS": 32 * WARPS, "STAGES": 1}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(matvec.matvec_kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": WARPS})
    return compiled.asm["cubin"]


def cuobjdump(flag: str, code: bytes) -> str:
    """Return what Triton's cuobjdump prints about machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        argv = [tool, flag, file.name]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    return shown.stdout


def loop(sass: str) -> list[str]:
    """Return the instructions of the longest loop."""
    instructions = {}
    for address, text in INSTRUCTION.findall(sass):
        instructions[int(address, 16)] = text
    longest = []
    for address, text in instructions.items():
        branch = BRANCH.search(text)
        if branch is None:
            continue
        start = int(branch[1], 16)
        body = [line for at, line in instructions.items() if start <= at <= address]
        if len(body) > len(longest):
            longest = body
    return longest


def main() -> None:
    for case in CASES:
        code = cubin(*case)
        sass = cuobjdump("-sass", code)
        body = loop(sass)
        usage = cuobjdump("-res-usage", code)
        loads = [line for line in body if "LDG" in line]
        facts = {
            "case": case,
            "instructions_per_weight": len(body) / (ROWS * 128 / case[0]),
            "barriers": sum("BAR" in line for line in body),
            "loads": len(loads),
            "loads_of_16_bytes": sum(".128" in line for line in loads),
            "flush_subnormals": sass.count(".FTZ"),
            "spilled_bytes": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        }
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
