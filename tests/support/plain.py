"""List what makes Python hard to read, and hold each file to the number of findings it has.

    python tests/support/plain.py             findings per 1,000 lines, folder by folder
    python tests/support/plain.py FILE ...    each finding in these files: file:line: kind: code
    python tests/support/plain.py --write     lower the numbers in tests/data/style_exceptions.toml
    python tests/support/plain.py --write --allow-more    write the numbers as they are

What is found, and what to write instead:

    long line            more than 100 columns                    one argument a line
    packed               a, b = x, y (unless it is a swap)        one assignment a line
    nested               a comprehension in another, two for      a loop, or a named inner list
    chained conditional  a if x else b if y else c                if, elif, else
    conditional loop     for x in items if c else ()              an if around the loop
                         range(n if c else 1)
    conditional items    f(*(a if c else ())), {**(a if c else {})}  an if with append or update
                         items + ([x] if c else [])
    side effect          f() if c else g(), or c and f(),         if and else
                         as a statement
    walrus               (name := ...) outside if and while       an assignment on its own line
    lambda               stored, with a default argument, or      a named function
                         longer than 60 characters
    bool arithmetic      16 * (a > b), "s" * flag                 an if, or a if c else b
    deep expression      more than 4 calls, one in another        a name for the inner result
    docstring            a function's starts with no verb; a      "Return ...", "Split ..."
                         class's with What, How, Whether ...
    undocumented         a public function or class of a library  a docstring
"""

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = ROOT / "tests/data/style_exceptions.toml"
PYPROJECT = ROOT / "pyproject.toml"
COLUMNS = 100
RUFF_TABLE = "[tool.ruff.lint.per-file-ignores]"
LONG_LINES_ALLOWED = ' = ["E501"]'

# Folders whose public functions need a docstring.
LIBRARIES = ("common", "planner", "lm", "training")
CONDITION = (ast.If, ast.While)
LOOP = (ast.For, ast.AsyncFor, ast.comprehension)
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITION = (*FUNCTION, ast.ClassDef)
STORING = (ast.Assign, ast.AnnAssign, ast.Dict, ast.DictComp, ast.Return, ast.arguments)
CHOOSING = (ast.IfExp, ast.BoolOp, ast.Tuple, ast.List)  # their result may be one of their parts
RETURN_BOOL = {"all", "any", "bool", "callable", "hasattr", "isinstance", "issubclass"}
BOOL_ACTIONS = {"'store_true'", "'store_false'", "argparse.BooleanOptionalAction"}
AUTOGRAD_METHODS = {"forward", "backward", "setup_context", "jvp", "vmap"}
QUESTIONS = (
    *("By ", "For ", "How ", "Of ", "That ", "Those "),
    *("What ", "Where ", "Whether ", "Which ", "Who "),
)
VERBS = """
    Abort Accept Accumulate Act Adapt Add Adjust Advance Align All-gather All-reduce Allocate
    Allow Answer Append Apply Approximate Ask Assemble Assert Assign Attach Average Avoid
    Backpropagate Become Begin Benchmark Bind Bisect Block Bring Broadcast Build
    Cache Calculate Calibrate Call Cancel Capture Carry Cast Catch Change Check Choose Clamp
    Clean Clear Clip Clone Close Collect Combine Compare Compile Complete Compress Compute
    Concatenate Configure Confirm Connect Construct Continue Contract Convert Copy Correct Count
    Cover Create Cut Cycle
    Damage Decode Decompress Define Delete Dequantize Derive Describe Destroy Detach Detect
    Determine Disable Discard Disconnect Dispatch Display Distribute Divide Do Download Drain
    Draw Drop Dump
    Embed Emit Empty Enable Encode End Ensure Enter Enumerate Escape Estimate Evaluate Exchange
    Exclude Execute Exercise Exit Expand Explain Export Express Extend Extract
    Fail Fake Feed Fetch Fill Filter Find Finish Fit Flatten Flush Fold Follow Force Forget Fork
    Format Free Freeze Fuse
    Gather Generate Get Give Go Group Guess
    Halve Hand Handle Hash Have Hide Hold Hook
    Identify Ignore Import Include Increase Index Infer Initialize Inject Insert Inspect Install
    Interleave Interrupt Invert Iterate
    Join Judge
    Keep Kill
    Label Launch Lay Lead Leave Lengthen Let Lift Limit Link List Listen Load Locate Lock Log
    Look Lower
    Make Map Mark Mask Match Measure Mend Merge Mirror Mix Mock Modify Monitor Move Multiply
    Name Nest Normalize Note Notify
    Observe Offload Omit Open Order Overlap Overwrite
    Pack Pad Parse Partition Pass Patch Pause Peek Perform Permute Persist Pick Pin Pipe Place
    Plan Plant Play Plot Point Poll Postpone Predict Prefetch Prefill Prepare Prepend Preserve
    Press Prevent Print Probe Process Produce Profile Project Propagate Prove Provide Prune
    Publish Pull Push Put
    Quantize Query Queue Quit Quote
    Raise React Read Rebuild Receive Recompute Reconstruct Record Recover Redirect Reduce
    Reduce-scatter Refill Refresh Refuse Register Reject Release Reload Remember Remove Rename
    Render Reorder Repeat Replace Replay Replicate Report Represent Request Require Rerun
    Rescale Reserve Reset Reshape Reshard Resolve Restart Restore Resume Retry Return Reuse
    Reverse Revert Rewind Rewrite Roll Rotate Round Route Run
    Sample Sanitize Save Scale Scan Scatter Schedule Score Search Seed Select Send Separate
    Serve Set Shard Shift Shorten Show Shrink Shuffle Shut Signal Silence Simplify Simulate Skip
    Sleep Slice Solve Sort Spawn Split Spoil Spread Stack Start Step Stop Store Stream Strike
    Strip Substitute Subtract Suggest Sum Summarize Supply Suspend Swap Switch Synchronize
    Tag Take Teach Tell Terminate Test Tie Time Tokenize Touch Trace Track Train Transfer
    Transform Translate Transpose Traverse Treat Trim Truncate Try Tune Turn
    Undo Unflatten Unfreeze Unlock Unpack Unpad Unroll Unscale Unshard Unwrap Update Upload Use
    Validate Vary Verify View Visit Visualize
    Wait Walk Warm Warn Watch Weigh Wrap Write
    Yield
    Zero
"""
IMPERATIVES = VERBS.split()  # what the docstring of a function may start with


class Source:
    """A file, its syntax tree, and the names in it that are known to hold True or False."""

    def __init__(self, path: Path, text: str):
        self.path = path  # relative to the repository
        self.text = text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in self.nodes:
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def above(self, node: ast.AST, passed: type | tuple[type, ...]) -> ast.AST | None:
        """Return the first node above that is not of the types to be passed."""
        parent = self.parents.get(node)
        while isinstance(parent, passed):
            parent = self.parents.get(parent)
        return parent

    @property
    def is_test(self) -> bool:
        return self.path.name.startswith("test_") or self.path.name == "conftest.py"

    @cached_property
    def flag_names(self) -> set[str]:
        """Names that are annotated as bool or have True or False as default value."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.arguments):
                names |= bool_parameters(node)
            elif isinstance(node, ast.AnnAssign) and is_bool_type(node.annotation):
                names.add(ast.unparse(node.target))
        return names

    @cached_property
    def flag_attributes(self) -> set[str]:
        """Attributes that are annotated as bool, and the store_true options of a parser."""
        attributes = set()
        for node in self.nodes:
            if isinstance(node, ast.AnnAssign) and is_bool_type(node.annotation):
                if isinstance(node.target, ast.Attribute):
                    attributes.add(node.target.attr)
                elif isinstance(self.parents[node], ast.ClassDef):
                    attributes.add(ast.unparse(node.target))
            elif isinstance(node, ast.Call):
                destination = bool_option(node)
                if destination:
                    attributes.add(destination)
        return attributes


def is_bool_type(annotation: ast.expr | None) -> bool:
    """Tell whether an annotation is bool."""
    return isinstance(annotation, ast.Name) and annotation.id == "bool"


def is_bool_constant(node: ast.AST | None) -> bool:
    """Tell whether an expression is True or False."""
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def bool_parameters(arguments: ast.arguments) -> set[str]:
    """Return the names of the parameters that hold True or False."""
    positional = [*arguments.posonlyargs, *arguments.args]
    names = set()
    for parameter in [*positional, *arguments.kwonlyargs]:
        if is_bool_type(parameter.annotation):
            names.add(parameter.arg)
    with_default = positional[len(positional) - len(arguments.defaults) :] + arguments.kwonlyargs
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    for parameter, default in zip(with_default, defaults, strict=True):
        if is_bool_constant(default):
            names.add(parameter.arg)
    return names


def bool_option(call: ast.Call) -> str | None:
    """Return the attribute of args that this add_argument makes, if it is True or False."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return None
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if keywords.get("action") not in BOOL_ACTIONS:
        return None
    if "dest" in keywords:
        return keywords["dest"].strip("'")
    for argument in call.args:
        option = ast.unparse(argument).strip("'")
        if option.startswith("--"):
            return option.removeprefix("--").replace("-", "_")
    return None


def is_flag(node: ast.AST, source: Source) -> bool:
    """Tell whether an expression is known to be True or False."""
    if isinstance(node, ast.Compare) or is_bool_constant(node):
        return True
    if isinstance(node, ast.BoolOp):  # of numbers, as in (count or 1), it is a number
        return any(is_flag(value, source) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in RETURN_BOOL
    if isinstance(node, ast.Name):
        return node.id in source.flag_names
    return isinstance(node, ast.Attribute) and node.attr in source.flag_attributes


def is_count(node: ast.AST) -> bool:
    """Tell whether a string may be repeated so often: an integer, len(), or arithmetic."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "len"
    return isinstance(node, ast.BinOp)


def is_string(node: ast.AST) -> bool:
    """Tell whether an expression is a string constant."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_empty(node: ast.AST) -> bool:
    """Tell whether an expression is (), [] or {}."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return not node.elts
    return isinstance(node, ast.Dict) and not node.keys


def call_depth(node: ast.AST) -> int:
    """Return how many calls are inside each other at the deepest place."""
    deepest = max((call_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    if isinstance(node, ast.Call):
        return deepest + 1
    return deepest


def packed(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    if not isinstance(node.targets[0], ast.Tuple):
        return False
    targets = {ast.unparse(target) for target in node.targets[0].elts}
    values = {ast.unparse(value) for value in node.value.elts}
    return not targets & values  # a swap needs both in one statement


def nested(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, COMPREHENSION):
        return False
    if len(node.generators) > 1:
        return True
    parent = source.parents.get(node)
    while parent is not None and not isinstance(parent, ast.stmt):
        if isinstance(parent, COMPREHENSION):
            return True
        parent = source.parents.get(parent)
    return False


def chained_conditional(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))


def conditional_loop(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    parent = source.parents[node]
    if isinstance(parent, LOOP) and parent.iter is node:
        return True
    call = source.above(node, (ast.BinOp, ast.UnaryOp))
    return isinstance(call, ast.Call) and ast.unparse(call.func) == "range"


def conditional_items(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.IfExp):
        return False
    if not is_empty(node.body) and not is_empty(node.orelse):
        return False
    parent = source.parents[node]
    if isinstance(parent, (ast.Starred, ast.BinOp, ast.AugAssign)):
        return True
    if isinstance(parent, ast.keyword):
        return parent.arg is None
    if isinstance(parent, ast.Dict):
        index = parent.values.index(node)
        return parent.keys[index] is None
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
        return parent.func.attr in ("extend", "update")
    return False


def side_effect(node: ast.AST, source: Source) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.IfExp, ast.BoolOp))


def walrus(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.NamedExpr):
        return False
    parent = source.parents[node]
    while not isinstance(parent, (ast.stmt, ast.comprehension, ast.Call)):
        parent = source.parents[parent]
    return not isinstance(parent, CONDITION)


def hard_lambda(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, ast.Lambda):
        return False
    if node.args.defaults or node.args.kw_defaults:
        return True
    stored = isinstance(source.above(node, CHOOSING), STORING)
    return stored or len(ast.unparse(node)) > 60


def bool_arithmetic(node: ast.AST, source: Source) -> bool:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return is_flag(node.value, source)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    for factor, other in ((node.left, node.right), (node.right, node.left)):
        if is_flag(factor, source):
            return True
        if is_string(factor) and not is_count(other):
            return True
    return False


def deep_expression(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, (ast.Assign, ast.Return, ast.Expr)) or node.value is None:
        return False
    return call_depth(node.value) > 4


def may_be_noun(node: ast.AST, source: Source) -> bool:
    """Tell whether a docstring may begin with a noun: of a class, property or autograd method."""
    if isinstance(node, ast.ClassDef) or source.is_test:
        return True
    if node.name.startswith("__") and node.name.endswith("__"):
        return True
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(name.endswith(("property", ".setter")) for name in decorators):
        return True
    parent = source.parents[node]
    if not isinstance(parent, ast.ClassDef) or node.name not in AUTOGRAD_METHODS:
        return False
    return any(ast.unparse(base).endswith("Function") for base in parent.bases)


def unclear_docstring(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, DEFINITION):
        return False
    text = ast.get_docstring(node)
    if not text:
        return False
    if may_be_noun(node, source):
        return text.startswith(QUESTIONS)
    words = re.findall(r"[\w-]+|[^\w\s]", text)
    if words[0] not in IMPERATIVES:
        return True
    return words[1:2] == ["of"]  # "Sum of ..." is a noun


def undocumented(node: ast.AST, source: Source) -> bool:
    if not isinstance(node, DEFINITION) or source.path.parts[0] not in LIBRARIES:
        return False
    if node.name.startswith("_") or not isinstance(source.parents[node], ast.Module):
        return False
    return not ast.get_docstring(node)


RULES = {
    "packed": packed,
    "nested": nested,
    "chained conditional": chained_conditional,
    "conditional loop": conditional_loop,
    "conditional items": conditional_items,
    "side effect": side_effect,
    "walrus": walrus,
    "lambda": hard_lambda,
    "bool arithmetic": bool_arithmetic,
    "deep expression": deep_expression,
    "docstring": unclear_docstring,
    "undocumented": undocumented,
}


def findings(path: Path, text: str) -> list[tuple[int, str]]:
    """Return (line number, kind) for all that is hard to read in a file, in order of lines."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS:
            found.append((number, "long line"))
    source = Source(path, text)
    for node in source.nodes:
        for kind, rule in RULES.items():
            if rule(node, source):
                found.append((node.lineno, kind))
    return sorted(found)


def count_docstrings(text: str) -> int:
    """Return how many public functions, methods and classes have a docstring."""
    tree = ast.parse(text)
    bodies = [tree]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bodies.append(node)
    documented = 0
    for body in bodies:
        for node in body.body:
            if isinstance(node, DEFINITION) and not node.name.startswith("_"):
                documented += ast.get_docstring(node) is not None
    return documented


def python_files() -> Iterator[Path]:
    """Yield the Python files of the repository, without what is made or downloaded."""
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]):
        file = path.relative_to(ROOT)
        downloaded = file.parts[0] == "models" and len(file.parts) > 2
        if downloaded or "runs" in file.parts or file.is_relative_to("tests/data"):
            continue
        yield file


@dataclass
class Style:
    """The numbers that tests/test_style.py holds."""

    findings: dict[str, int]  # by file; a file without findings is not in here
    docstrings: int  # of the whole repository without tests


def measure() -> tuple[Style, dict[str, int]]:
    """Count the findings and docstrings of the repository, and the lines of each file."""
    style = Style({}, 0)
    lines = {}
    for file in python_files():
        text = (ROOT / file).read_text(encoding="utf-8")
        lines[str(file)] = text.count("\n")
        count = len(findings(file, text))
        if count:
            style.findings[str(file)] = count
        if file.parts[0] != "tests":
            style.docstrings += count_docstrings(text)
    return style, lines


def read_exceptions() -> Style:
    """Read the numbers that are allowed."""
    if not EXCEPTIONS.exists():
        return Style({}, 0)
    table = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    return Style(table["findings"], table["docstrings"])


def write_exceptions(style: Style) -> None:
    """Write the numbers that are allowed."""
    lines = [
        "# The most findings of tests/support/plain.py in each file, for tests/test_style.py.",
        "# Numbers go down only: python tests/support/plain.py --write",
        "",
        "# Public functions, methods and classes with a docstring: at least so many.",
        f"docstrings = {style.docstrings}",
        "",
        "[findings]",
    ]
    for file, count in sorted(style.findings.items()):
        lines.append(f'"{file}" = {count}')
    EXCEPTIONS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def more_than_allowed(now: Style, allowed: Style) -> list[str]:
    """Return a message for each number that has become worse."""
    messages = []
    for file, count in now.findings.items():
        most = allowed.findings.get(file, 0)
        if count > most:
            messages.append(
                f"{file}: {count} findings, at most {most} are allowed: "
                f"`python tests/support/plain.py {file}` lists them"
            )
    if now.docstrings < allowed.docstrings:
        messages.append(f"{now.docstrings} docstrings, there were {allowed.docstrings}")
    return messages


def fewer_than_allowed(now: Style, allowed: Style) -> list[str]:
    """Return a message for each number of findings that is to be lowered."""
    messages = []
    for file, most in allowed.findings.items():
        count = now.findings.get(file, 0)
        if count < most:
            messages.append(
                f"{file}: {count} findings, {EXCEPTIONS.name} allows {most}: lower the number with "
                "`python tests/support/plain.py --write`"
            )
    return messages


def long_files() -> list[str]:
    """Return the files that have a line of more than 100 columns."""
    found = []
    for file in python_files():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        if any(len(line) > COLUMNS for line in lines):
            found.append(str(file))
    return found


def ruff_exceptions() -> list[str]:
    """Return the files in which ruff allows long lines."""
    lint = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    ignored = lint.get("per-file-ignores", {})
    return [file for file, rules in ignored.items() if "E501" in rules]


def write_ruff_exceptions(allow_more: bool) -> None:
    """Write the files with long lines to the table per-file-ignores, if there is that table."""
    lines = PYPROJECT.read_text(encoding="utf-8").splitlines()
    if RUFF_TABLE not in lines:
        return
    start = lines.index(RUFF_TABLE) + 1
    end = start
    while end < len(lines) and lines[end].strip():
        end += 1
    files = long_files()
    if not allow_more:
        allowed = ruff_exceptions()
        files = [file for file in files if file in allowed]
    entries = [line for line in lines[start:end] if not line.endswith(LONG_LINES_ALLOWED)]
    entries += [f'"{file}"{LONG_LINES_ALLOWED}' for file in files]
    PYPROJECT.write_text("\n".join(lines[:start] + entries + lines[end:]) + "\n", encoding="utf-8")


def write(allow_more: bool) -> int:
    """Write the present numbers; without allow_more only those that have become better."""
    now, _ = measure()
    allowed = read_exceptions()
    write_ruff_exceptions(allow_more)
    refused = []
    if not allow_more:
        refused = more_than_allowed(now, allowed)
        for file, count in list(now.findings.items()):
            most = allowed.findings.get(file, 0)
            now.findings[file] = min(count, most)
            if most == 0:
                del now.findings[file]
        now.docstrings = max(now.docstrings, allowed.docstrings)
    write_exceptions(now)
    for message in refused:
        print(message)
    return 1 if refused else 0


def print_files(paths: list[Path]) -> None:
    """Print every finding in these files."""
    counts = Counter()
    for path in paths:
        file = path.resolve()
        if file.is_relative_to(ROOT):
            file = file.relative_to(ROOT)
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for number, kind in findings(file, text):
            counts[kind] += 1
            print(f"{path}:{number}: {kind}: {lines[number - 1].strip()[:110]}")
    print_summary(counts)


def print_folders() -> None:
    """Print findings per 1,000 lines, folder by folder."""
    style, lines = measure()
    found_in = Counter()
    lines_in = Counter()
    for file, count in lines.items():
        folder = file.split("/")[0] if "/" in file else "."
        lines_in[folder] += count
        found_in[folder] += style.findings.get(file, 0)
    for folder, count in sorted(lines_in.items()):
        per_1000 = 1000 * found_in[folder] / max(count, 1)
        print(f"{folder:25} {found_in[folder]:6,} in {count:6,} lines {per_1000:6.0f} per 1,000")
    kinds = Counter()
    for file in style.findings:
        text = (ROOT / file).read_text(encoding="utf-8")
        kinds.update(kind for _, kind in findings(Path(file), text))
    print_summary(kinds)


def print_summary(kinds: Counter) -> None:
    """Print how often each kind was found."""
    for kind, count in kinds.most_common():
        print(f"{kind:25} {count:6,}")
    print(f"{'all':25} {kinds.total():6,}")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, help="list what is found in these files")
    parser.add_argument("--write", action="store_true", help="write the numbers that are allowed")
    parser.add_argument("--allow-more", action="store_true", help="let --write raise numbers")
    args = parser.parse_args()
    if args.write:
        return write(args.allow_more)
    if args.files:
        print_files(args.files)
    else:
        print_folders()
    return 0


if __name__ == "__main__":
    sys.exit(main())
