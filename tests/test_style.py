"""No file becomes harder to read, and what ruff lets pass is not more than there is."""

from pathlib import Path

from support import plain

HARD_TO_READ = [
    ("long line", "total = " + "1 + " * 30 + "1"),
    ("packed", "a, b = 1, 2"),
    ("nested", "rows = [[y for y in x] for x in table]"),
    ("nested", "rows = [y for x in table for y in x]"),
    ("chained conditional", "a = 1 if x else 2 if y else 3"),
    ("conditional loop", "for x in items if c else ():\n    pass"),
    ("conditional loop", "xs = [x for x in (items if c else ())]"),
    ("conditional loop", "for x in range(1, n + 1 if c else 1):\n    pass"),
    ("conditional items", "f(*(a if c else ()))"),
    ("conditional items", "f(**({'a': 1} if c else {}))"),
    ("conditional items", "both = {**a, **(b if c else {})}"),
    ("conditional items", "words = words + ([x] if c else [])"),
    ("conditional items", "words += [x] if c else []"),
    ("conditional items", "words.extend([x] if c else [])"),
    ("side effect", "f() if c else g()"),
    ("side effect", "c and f()"),
    ("walrus", "print(x := 3)"),
    ("lambda", "double = lambda x: 2 * x"),
    ("lambda", "double = (lambda x: 2 * x) if c else None"),
    ("lambda", "table = {'double': lambda x: 2 * x}"),
    ("lambda", "def f(key=lambda x: x):\n    pass"),
    ("lambda", "sorted(items, key=lambda x, sign=sign: sign * x)"),
    ("bool arithmetic", "size = 16 * (a > b)"),
    ("bool arithmetic", "size = 16 * (not a)"),
    ("bool arithmetic", "size = 16 * isinstance(a, int)"),
    ("bool arithmetic", "size *= a == b"),
    ("bool arithmetic", "word = 's' * many"),
    ("bool arithmetic", "def f(many: bool):\n    return 16 * many"),
    ("bool arithmetic", "def f(a, many=False):\n    return 16 * many"),
    ("bool arithmetic", "def f(*, many=True):\n    return 16 * many"),
    ("bool arithmetic", "class A:\n    many: bool\n\n\nsize = 16 * a.many"),
    (
        "bool arithmetic",
        "parser.add_argument('-m', '--so-many', action='store_true')\nsize = args.so_many * 16",
    ),
    ("deep expression", "a = f(f(f(f(f(1)))))"),
    ("docstring", 'def f():\n    """The answer."""'),
    ("docstring", 'def f():\n    """Sum of all."""'),
    ("docstring", 'class A:\n    """What it is."""'),
    ("docstring", 'class A:\n    def f(self):\n        """(a, b) of it."""'),
]

PLAIN = [
    "a, b = b, a",
    "a = 1 if x else 2",
    "f(a if c else b)",
    "f(*(a if c else b))",
    "f(names=[] if c else names)",
    "for x in range(count(a if c else b)):\n    pass",
    "if (x := f()) is not None:\n    print(x)",
    "sorted(items, key=lambda x: x.name)",
    "rule = '-' * 16 + '-' * len(names) + '-' * (width - 2)",
    "size = 16 * (count or 1)",
    'def f():\n    """Return the answer."""',
    'class A:\n    """The answer."""\n\n    @property\n    def f(self):\n        """The answer."""',
    'class A(Function):\n    def forward(ctx, x):\n        """The answer."""',
    'class A:\n    def __len__(self):\n        """The answer."""',
]


def kinds(code: str, file: str = "lesson.py") -> set[str]:
    """Return the kinds of findings in some code."""
    return {kind for _, kind in plain.findings(Path(file), code + "\n")}


def test_what_is_hard_to_read_is_found():
    assert not [(kind, code) for kind, code in HARD_TO_READ if kind not in kinds(code)]


def test_what_is_plain_is_not_found():
    found = {code: kinds(code) for code in PLAIN}
    assert not {code: these for code, these in found.items() if these}


def test_only_libraries_need_docstrings_and_tests_may_state_facts():
    assert kinds("def f(): ...", "common/a.py") == {"undocumented"}
    assert kinds("def _f(): ...", "common/a.py") == set()
    assert kinds("def f(): ...", "04_amp/a.py") == set()
    assert kinds('def test_f():\n    """The sum is right."""', "tests/test_a.py") == set()


def test_no_file_becomes_harder_to_read_and_one_that_has_become_plainer_stays_so():
    now, _ = plain.measure()
    allowed = plain.read_exceptions()
    wrong = plain.more_than_allowed(now, allowed) + plain.fewer_than_allowed(now, allowed)
    assert not wrong, "\n".join(wrong)


def test_ruff_allows_long_lines_only_in_files_that_have_some():
    allowed = plain.ruff_exceptions()
    assert allowed == sorted(allowed)
    assert not set(allowed) - set(plain.long_files()), "python tests/support/plain.py --write"
