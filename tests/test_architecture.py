"""What the import contracts, the linter and the type checker cannot say about this repository.

A rule is a function from a file to complaints. Each is tried on a bad sample first, so that none is silent for ever.
"""

import ast
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_README_LINES = 410, 60, 150
MAX_MAIN_README_LINES = 120
VAGUE_NAMES = {"util", "utils", "helper", "helpers", "common", "manager", "managers", "misc"}
MAY_PRINT = ("loadtest/bench/", "deploy/models/", "tests/long/")
IN_TRITONS_ENVIRONMENT = (
    "model_repository/",
    "server/penstock/engines/triton_backends/",
    "server/penstock/engines/ort_serving/",
    "server/penstock/engines/torch_serving/",
    "server/penstock/engines/row_trial.py",
)
TRITONS_ENVIRONMENT = {
    *("numpy", "onnxruntime", "cv2", "triton_python_backend_utils", "ort_serving", "row_trial"),
    *("torch", "torchvision", "torch_serving", "onnx"),  # of `make gpu`: what uses them does not need them elsewhere
}
UNDER_TWO_NAMES = (
    "server/penstock/(engines/(ort|torch)_serving/"  # beside Triton's model.py, too: its imports are relative
    r"|models/onnx_to_torch/program\.py)"  # run by the Python of Triton's environment, without Penstock
)
MODEL_FILES = r"config\.pbtxt|MODEL\.md|labels\w*\.txt|golden\.(json|jpg)"
WELL_KNOWN_FOLDERS = {Path(p) for p in ("/", "/tmp", "/var/tmp", "/opt", "/srv", "/home", "/root", "/usr/src", "/app")}

REGISTRY = r"pypi\.org|pythonhosted\.org|(?<!\w)--(extra-)?index-url|(?<!\w)--find-links"

Rule = Callable[[str, str], Iterator[str]]


@lru_cache(maxsize=1)
def statements(text: str) -> list[ast.AST]:
    """The module of a Python file, and all its statements; of the last file, for every rule that asks."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        found.append(node := todo.pop())
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            todo += getattr(node, block, ())
    return found


def file_length(path: str, text: str) -> Iterator[str]:
    """A file is at most 410 lines."""
    count = text.count("\n")
    if count > MAX_FILE_LINES:
        yield f"{path}: {count} lines (at most {MAX_FILE_LINES}); split it by subject"


def function_length(path: str, text: str) -> Iterator[str]:
    """A function is at most 60 lines."""
    for node in statements(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} is {count} lines (at most {MAX_FUNCTION_LINES})"


def telling_name(path: str, text: str) -> Iterator[str]:
    """A file or folder is named after what is in it."""
    for part in Path(path).with_suffix("").parts:
        if VAGUE_NAMES & set(part.lower().split("_")):
            yield f"{path}: {part!r} says nothing; name the file after the noun it holds"


def absolute_imports(path: str, text: str) -> Iterator[str]:
    """Imports are absolute."""
    for node in statements(text):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{path}:{node.lineno}: relative import"


def no_print(path: str, text: str) -> Iterator[str]:
    """Programs log; only a bench prints its table, and a test of minutes its figures."""
    for node in ast.walk(ast.parse(text)) if "print(" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{path}:{node.lineno}: print"


def public_docstrings(path: str, text: str) -> Iterator[str]:
    """A public module, class or function says what its user gets."""
    module = statements(text)[0]
    assert isinstance(module, ast.Module)
    if module.body and not ast.get_docstring(module):
        yield f"{path}: the module has no docstring"
    for node in module.body:
        is_definition = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_definition and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{path}:{node.lineno}: {node.name} has no docstring"


def test_promises(path: str, text: str) -> Iterator[str]:
    """A test says what it promises, in a sentence."""
    for node in statements(text):
        is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if is_test and not (ast.get_docstring(node) or "").rstrip().endswith("."):
            yield f"{path}:{node.lineno}: {node.name} has no sentence that says what it promises"


def no_clock_in_parameters(path: str, text: str) -> Iterator[str]:
    """A test's parameter does not read the clock: it is made when pytest starts, and used many minutes later."""
    for node in statements(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for call in itertools.chain.from_iterable(ast.walk(decorator) for decorator in node.decorator_list):
                if isinstance(call, ast.Call) and re.search(r"(time|now|monotonic)\Z", ast.unparse(call.func)):
                    yield f"{path}:{call.lineno}: {ast.unparse(call)} is read when pytest starts; read it in the test"


test_promises.__test__ = False  # type: ignore[attr-defined]  # a rule, whatever its name


def imported_packages(text: str) -> Iterator[tuple[int, str]]:
    """The top-level name of each import, with its line."""
    for node in statements(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


def plain_core(path: str, text: str) -> Iterator[str]:
    """What all parts exchange knows the standard library, numpy, msgspec and itself."""
    for line, package in imported_packages(text):
        if package not in sys.stdlib_module_names | {"numpy", "penstock"}:
            yield f"{path}:{line}: the protocol imports {package}"


def tritons_imports(path: str, text: str) -> Iterator[str]:
    """What runs inside Triton imports only what its environment holds and what lies in its own folder."""
    roots = {Path(root) for root in IN_TRITONS_ENVIRONMENT}
    folders = itertools.takewhile(lambda folder: folder not in roots, Path(path).parents)
    beside = {entry.stem for folder in folders for entry in (CHECKOUT / folder).glob("*")}
    for line, package in imported_packages(text):
        if package not in sys.stdlib_module_names | TRITONS_ENVIRONMENT | beside:
            yield f"{path}:{line}: {package} is not in Triton's environment"


def repository_layout(path: str, text: str) -> Iterator[str]:
    """A model's folder holds config.pbtxt, numbered versions, labels, MODEL.md and its golden answers."""
    parts = Path(path).parts[1:]
    is_allowed = len(parts) > 1 and (parts[1].isdecimal() if len(parts) > 2 else re.fullmatch(MODEL_FILES, parts[1]))
    if not is_allowed:
        yield f"{path}: only config.pbtxt, <version>/, labels*.txt, MODEL.md, golden.json and golden.jpg may sit here"


def short_readme(path: str, text: str) -> Iterator[str]:
    """A README has at most 150 lines, the main one 120."""
    limit = MAX_MAIN_README_LINES if path == "README.md" else MAX_README_LINES
    if text.count("\n") > limit:
        yield f"{path}: {text.count(chr(10))} lines (at most {limit})"


def no_registry(path: str, text: str) -> Iterator[str]:
    """No file names a package registry: every machine has its own."""
    is_suspect = any(word in text for word in ("pypi", "pythonhosted", "index-url", "find-links"))  # a quick look
    for found in re.finditer(REGISTRY, text) if is_suspect else ():
        yield f"{path}:{line_of(text, found)}: a registry's address or option"
    yield from (f"{path}: this machine's registry" for host in registry_hosts() if host in text)


def no_machine_path(path: str, text: str) -> Iterator[str]:
    """No file names a path of the machine that it was written on."""
    for found in path_of_this_machine().finditer(text):
        yield f"{path}:{line_of(text, found)}: a path of one machine"


def pinned_by_hash(path: str, text: str) -> Iterator[str]:
    """A lock pins every package to one version and its hashes, and holds no address."""
    for entry in re.split(r"\n(?=[A-Za-z])", text.strip()):
        name = entry.split("\n")[0]
        if "==" not in name or "--hash=sha256:" not in entry or "://" in entry:
            yield f"{path}: {name!r} is not pinned by version and hash alone"


def line_of(text: str, found: re.Match[str]) -> int:
    """The number of the line in which a match begins."""
    return text.count("\n", 0, found.start()) + 1


@cache
def path_of_this_machine() -> re.Pattern[str]:
    """A path in a person's home, or of this checkout."""
    folders = {CHECKOUT, CHECKOUT.parent, Path.home()} - WELL_KNOWN_FOLDERS
    known = "|".join(["/home/[a-z]", "/Users/[a-z]", "/root/", *(re.escape(f"{folder}/") for folder in folders)])
    return re.compile(rf"(?<![\w.}}-])({known})")


def registry_hosts() -> set[str]:
    """The hosts that this machine's pip and uv are configured to ask."""
    names = [name for name in os.environ if name.startswith(("PIP_", "UV_")) and re.search("INDEX|LINKS", name)]
    received = [os.environ[name] for name in names]
    return {host for url in received for one in url.split() if (host := urlsplit(one).hostname)}


PYTHON = r".*\.py"
EVERYTHING_ELSE = r"(?!tests/test_architecture\.py).*"  # this file shows what it forbids
RULES: dict[Rule, str] = {
    file_length: PYTHON,
    function_length: PYTHON,
    telling_name: r".*",
    absolute_imports: rf"(?!{UNDER_TWO_NAMES}){PYTHON}",
    no_print: rf"(?!{'|'.join(MAY_PRINT)}){PYTHON}",
    public_docstrings: rf"(server|deepstream_pipeline|loadtest)/{PYTHON}",
    test_promises: rf"tests/{PYTHON}",
    no_clock_in_parameters: rf"tests/{PYTHON}",
    plain_core: r"server/penstock/protocol/(call|cancellation|engine|errors|identity|inference|request_checks)\.py",
    tritons_imports: rf"({'|'.join(IN_TRITONS_ENVIRONMENT)}){PYTHON}",
    repository_layout: r"model_repository/.*",
    short_readme: r"(.*/)?README\.md",
    no_registry: EVERYTHING_ELSE,
    no_machine_path: EVERYTHING_ELSE,
    pinned_by_hash: r"requirements/.*\.txt",
}


def repository_files() -> list[str]:
    """Every file that is, or would be, in version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for path in listed.stdout.split("\0") if path and (CHECKOUT / path).is_file()]


@cache
def complaints() -> dict[Rule, list[str]]:
    """What each rule has against this repository, read once."""
    found: dict[Rule, list[str]] = {rule: [] for rule in RULES}
    for path in repository_files():
        text = (CHECKOUT / path).read_text(encoding="utf-8", errors="replace")
        for rule, meant_for in RULES.items():
            if re.fullmatch(meant_for, path):
                found[rule] += rule(path, text)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_the_rule(rule: Rule) -> None:
    """Every file of the repository keeps every rule that is meant for it."""
    assert complaints()[rule] == []


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
BAD_SAMPLES: list[tuple[Rule, str, str]] = [
    (file_length, "server/a.py", "x = 1\n" * 411),
    (function_length, "server/a.py", LONG_FUNCTION),
    (function_length, "server/a.py", "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())),
    (telling_name, "server/utils.py", ""),
    (telling_name, "server/penstock/batch_manager.py", ""),
    (telling_name, "server/common/tensor.py", ""),
    (absolute_imports, "server/a.py", "from .core import tensor"),
    (no_print, "server/a.py", "def f():\n    print('x')"),
    (public_docstrings, "server/a.py", "x = 1"),
    (public_docstrings, "server/a.py", '"""A."""\ndef f():\n    pass'),
    (public_docstrings, "server/a.py", '"""A."""\nclass A:\n    pass'),
    (test_promises, "tests/test_a.py", "async def test_a():\n    pass"),
    (test_promises, "tests/test_a.py", 'class TestA:\n    def test_a(self):\n        """a"""'),
    (no_clock_in_parameters, "tests/a.py", "@parametrize('at', [time.time() + 600])\ndef f(at):\n    pass"),
    (plain_core, "server/penstock/protocol/engine.py", "def f():\n    import grpc.aio"),
    (tritons_imports, "model_repository/a/1/model.py", "from penstock.protocol import tensor"),
    (tritons_imports, "server/penstock/engines/ort_serving/a.py", "from penstock.protocol import tensor"),
    (repository_layout, "model_repository/README.md", ""),
    (repository_layout, "model_repository/a/photo.jpg", ""),
    (repository_layout, "model_repository/a/weights/model.onnx", ""),
    (short_readme, "README.md", "x\n" * 121),
    (short_readme, "server/README.md", "x\n" * 151),
    (no_registry, "requirements/base.txt", "--index-url https://example.org/simple"),
    (no_registry, "deploy/Dockerfile", "RUN pip install --find-links=/wheels penstock"),
    (no_registry, "README.md", "see pypi.org/project/penstock"),
    (no_machine_path, "Makefile", "cd /home/ann/penstock"),
    (no_machine_path, "Makefile", "cp /root/.netrc ."),
    (pinned_by_hash, "requirements/base.txt", "numpy>=2\n"),
    (pinned_by_hash, "requirements/base.txt", "numpy==2.0\n    # via penstock"),
    (pinned_by_hash, "requirements/base.txt", "a==1 \\\n    --hash=sha256:00\nb @ https://example.org/b.whl\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD_SAMPLES, ids=lambda value: getattr(value, "__name__", None))
def test_rule_on_a_bad_sample_complains(rule: Rule, path: str, text: str) -> None:
    """No rule is silent: each complains of a file that breaks it, and is meant for that file."""
    assert list(rule(path, text))
    assert rule is no_registry or re.fullmatch(RULES[rule], path)


def test_rules_each_have_a_bad_sample() -> None:
    """A rule without a bad sample might never complain, so every rule has one."""
    assert {rule for rule, _, _ in BAD_SAMPLES} == set(RULES)


def test_registry_of_this_machine_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package index of this machine may stand in no file."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.net/simple")
    assert list(no_registry("Makefile", "curl https://mirror.example.net/simple/numpy"))


def test_programs_each_have_a_page() -> None:
    """Each program says on one page what flows where and where a new thing goes."""
    for program in ("server", "deepstream_pipeline", "loadtest"):
        assert "Where does X go?" in (CHECKOUT / program / "README.md").read_text(), program


def test_command_line_imports_nothing_heavy() -> None:
    """`penstock --help` answers before any program, framework or native library is imported."""
    heavy = (
        "{'numpy', 'cv2', 'grpc', 'fastapi', 'pydantic', 'penstock.gateway.main', 'penstock_video', 'penstock_load'}"
    )
    program = f"import sys, penstock.cli.main; raise SystemExit(' '.join({heavy} & set(sys.modules)) or None)"
    answer = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")


def lint_imports(folder: Path) -> str:
    """What lint-imports says of the packages in the folder, judged by our contracts."""
    command = [BIN / "lint-imports", "--config", CHECKOUT / ".importlinter", "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False).stdout


def contract_modules() -> set[str]:
    """The modules of ours that the contracts name: import-linter refuses a contract whose modules do not exist."""
    text = (CHECKOUT / ".importlinter").read_text()
    return set(
        re.findall(r"^    ((?:penstock|penstock_video|penstock_load|deploy|loadtest\.bench)(?:\.\w+)*)$", text, re.M)
    )


def test_import_contracts_are_kept_here_and_broken_by_a_bad_sample(tmp_path: Path) -> None:
    """Every contract holds in this repository, and every one of them breaks where it is meant to."""
    bad = {
        "penstock/protocol/a.py": "import asyncio\nfrom penstock.gateway.rest import b",
        "penstock/gateway/rest/b.py": "import cv2, penstock.gateway.settings",
        "penstock/gateway/audit.py": "import penstock.gateway.main",
        "penstock/vision/a.py": "import fastapi",
        "penstock/surprise.py": "",
        "penstock_video/types.py": "from penstock_video.track import a",
        "penstock_video/track/a.py": "",
        "penstock_video/infer/a.py": "import penstock.gateway.rest.b",
        "penstock_load/users/a.py": "import deploy.models, penstock.protocol.a",
        "penstock_load/scenario.py": "import penstock_load.users.a",
    }
    layers = "gateway/batching gateway/workers gateway/dataplane gateway/main gateway/settings"
    stubs = [*contract_modules(), "deploy.models"]
    stubs += [f"penstock_video.{name}" for name in ("interfaces", "errors", "detections")]
    stubs += [f"penstock/{layer}".replace("/", ".") for layer in layers.split()]
    for path in [*bad, *(f"{name.replace('.', '/')}/__init__.py" for name in stubs)]:
        if f"{path.removesuffix('/__init__.py')}.py" not in bad:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            for folder in list((tmp_path / path).relative_to(tmp_path).parents)[:-1]:
                if folder != Path("loadtest"):  # a namespace package, as here
                    (tmp_path / folder / "__init__.py").touch()
            (tmp_path / path).write_text(bad.get(path, ""))
    for path, text in bad.items():
        (tmp_path / path).write_text(text)
    ours, theirs = lint_imports(CHECKOUT), lint_imports(tmp_path)
    assert "BROKEN" not in ours
    kept = re.findall(r"^(.*) KEPT(?: \(\d ignored imports\))?$", ours, re.MULTILINE)
    assert len(kept) == (CHECKOUT / ".importlinter").read_text().count("[importlinter:contract:")
    assert re.findall(r"^(.*) BROKEN$", theirs, re.MULTILINE) == kept, theirs
