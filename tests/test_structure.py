"""The house stands as CONTRIBUTING.md draws it: who may import whom, what is private, how large a file may be."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

import lmcache_cartridge

PACKAGE = "lmcache_cartridge"
ROOT = Path(lmcache_cartridge.__file__).parent
ROOMS = [
    "errors",
    "settings",
    "artifact",
    "library",
    "sources",
    "memory",
    "engine",
    "serve",
    "fleet",
    "make",
    "validate",
    "cli",
]
"""From the top: each may import what stands before it, and itself."""
ALSO = {"settings": {f"{PACKAGE}.artifact.location"}}
"""Modules further down that a room may import; `artifact.location` has only the grammar of locations."""
HOSTS = {"lmcache", "vllm", "transformers", "peft", "boto3", "botocore"}
"""What no room above `engine` knows, but for boto3 in the S3 source."""
MAX_LINES = 450
PUBLIC_THOUGH_UNDERSCORED = {"_replace", "_asdict", "_fields", "_make", "_MEIPASS"}
"""Of `typing.NamedTuple`, documented."""


def imports(source: str, module: str) -> set[str]:
    """Return the absolute names of all that a module imports, wherever it does: `lmcache_cartridge.library.index`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}  # the name may be a module itself
    return found


def private_reach(source: str) -> list[str]:
    """Return the private names that a module uses and does not define itself, `line: name`."""
    tree = ast.parse(source)
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_"):
            own.add(node.value)  # `__slots__`
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value) and _is_private(node.attr):
            name = node.attr
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if _is_private(alias.name)]
            found += [f"{node.lineno}: {name}" for name in names]
            continue
        else:
            continue
        if name not in own:
            found.append(f"{node.lineno}: {name}")
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_THOUGH_UNDERSCORED


def _module(path: Path) -> str:
    parts = [PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for path in sorted(ROOT.rglob("*.py"))}
SOURCES = {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}
IMPORTS = {
    module: imports(source, f"{module}.__init__" if FILES[module].name == "__init__.py" else module)
    for module, source in SOURCES.items()
}


def room(module: str) -> str | None:
    """Return the room of a module of this package; None for the package itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in ROOMS else None


def module_of(name: str) -> str | None:
    """Return the module of this package that an import names, None for others."""
    while name.startswith(PACKAGE):
        if name in FILES:
            return name
        name = name.rpartition(".")[0]
    return None


def test_the_root_has_three_files_and_the_rooms():
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "errors.py", "settings.py"]
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(ROOMS) and rooms >= set(ROOMS) - {"errors", "settings"}


def test_every_import_points_up():
    wrong = [
        (module, name)
        for module, found in IMPORTS.items()
        if (here := room(module))
        for name in found
        if (there := room(name)) and ROOMS.index(there) > ROOMS.index(here)
        if module_of(name) not in ALSO.get(here, ())
    ]
    assert wrong == [], "imports from rooms below its own"


def test_no_module_imports_itself_by_way_of_others():
    needs = {module: set(map(module_of, found)) - {module, PACKAGE, None} for module, found in IMPORTS.items()}
    while needs:
        ready = {module for module, wanted in needs.items() if not wanted & set(needs)}
        assert ready, f"a circle among {sorted(needs)}"
        for module in ready:
            del needs[module]


def test_no_file_uses_private_members_of_another():
    hosts = {f"{PACKAGE}.engine.{name}" for name in ("host", "host_api", "host_inprocess")}
    """The place for what vLLM and LMCache do not promise."""
    reach = {module: private_reach(source) for module, source in SOURCES.items() if module not in hosts}
    assert {module: names for module, names in reach.items() if names} == {}


def test_no_file_is_too_long():
    assert [module for module, source in SOURCES.items() if len(source.splitlines()) > MAX_LINES] == []


NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def code_tokens(source: str) -> int:
    """Return the tokens of a module, comments and docstrings not counted, so that denser lines win nothing."""
    count = sum(t.type not in NO_CODE for t in tokenize.generate_tokens(io.StringIO(source).readline))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    return count - sum(ast.get_docstring(node) is not None for node in nodes)


def test_no_room_is_larger_than_its_ceiling():
    """`ceilings.json` has the tokens of each room; it is lowered as a room shrinks, and never raised."""
    sizes: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        inner = path.relative_to(ROOT).parts
        sizes[inner[0] if len(inner) > 1 else "."] += code_tokens(path.read_text())
    ceilings = json.loads(Path(__file__).with_name("ceilings.json").read_text())
    assert {room: size for room, size in sizes.items() if size > ceilings.get(room, 0)} == {}
    assert set(sizes) <= set(ceilings)


def test_the_rooms_above_the_engine_know_no_engine_and_no_cloud():
    for module in [m for m in FILES if (r := room(m)) and ROOMS.index(r) < ROOMS.index("engine")]:
        is_s3 = module in (f"{PACKAGE}.sources.s3", f"{PACKAGE}.sources.s3_client")
        hosts = HOSTS - ({"boto3", "botocore"} if is_s3 else set())
        assert [name for name in IMPORTS[module] if name.partition(".")[0] in hosts] == [], module


def test_what_is_imported_is_declared_or_comes_with_what_is():
    """A package that only our tests' environment has would be missed by users alone."""
    setup = ConfigParser()
    setup.read(ROOT.parent / "setup.cfg")
    extras = {name: text for name, text in setup["options.extras_require"].items() if name != "test"}
    lines = "\n".join([setup["options"]["install_requires"], *extras.values()]).split()
    declared = {re.split(r"[>=\[]", line)[0].lower().replace("-", "_") for line in lines}
    brought = {"vllm", "lmcache", "fastapi", "starlette", "psutil", "botocore", "urllib3"}  # the engine's, and boto3's
    named = {"yaml": "pyyaml", "zmq": "pyzmq"}
    tops = {name.partition(".")[0] for names in IMPORTS.values() for name in names} - sys.stdlib_module_names
    assert {named.get(top, top) for top in tops} - declared - brought == {PACKAGE}


def _loaded_by(code: str, *arguments: str) -> list[set[str]]:
    """Return the modules that a fresh Python has loaded after `code`, and each process that it forked, those first; `code` may
    end by `SystemExit`.
    """
    report = (
        "import sys, os\ntry:\n    {}\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print('loaded', *sorted(sys.modules))"
    ).format(code.replace("\n", "\n    "))
    done = subprocess.run(
        [sys.executable, "-c", report, *arguments], capture_output=True, text=True, check=True, timeout=900
    )
    return [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("loaded ")]


_HEAVY = {"torch", "vllm", "lmcache", "transformers", "boto3"}
_RUN_CLI = "from lmcache_cartridge.cli.main import main\nsys.exit(main(sys.argv[1:]))"


def test_decoders_are_made_when_their_module_is_imported():
    """msgspec 0.22 learns a type when it is first decoded; threads that decode it at once end the process with SIGSEGV."""
    late = [module for module, source in SOURCES.items() if list(late_decoders(ast.parse(source)))]
    assert late in ([], [f"{PACKAGE}.artifact.model"])


def late_decoders(tree: ast.AST) -> Iterator[str]:
    """Yield what has msgspec learn types while functions run."""
    for function in ast.walk(tree):
        for node in ast.walk(function) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("msgspec."):
                is_typed = any(k.arg == "type" and ast.unparse(k.value) != "list" for k in node.keywords)
                if name.endswith((".Decoder", ".convert")) or is_typed:
                    yield name


@pytest.mark.parametrize(
    ("code", "words", "more"),
    [
        ("import lmcache_cartridge.sources.s3", "", set()), (_RUN_CLI, "--help", {"numpy", "msgspec", "pydantic"}),
        (_RUN_CLI, "list --home HOME", set()),
    ],
    ids=["reading S3", "--help", "list"],
)  # fmt: skip
def test_what_needs_no_engine_loads_nothing_heavy(code, words, more, tmp_path):
    [loaded] = _loaded_by(code, *words.replace("HOME", str(tmp_path / "home")).split())
    assert PACKAGE in loaded and loaded & (_HEAVY | more) == set()


def test_what_each_connector_loads():
    """vLLM imports a connector's module in every process, in some before LMCache may be imported. In multiprocess mode the store
    is in LMCache's server: of the library there is the type of a hash alone.
    """
    own, other = (f"{PACKAGE}.engine.{name}" for name in ("connector", "mp_connector"))
    loaded, beside = _loaded_by(
        f"import vllm.config\nif os.fork():\n    os.wait()\n    import {other}\nelse:\n    import {own}"
    )
    assert own in loaded and {"torch", "vllm"} <= loaded, "the control of those that load nothing heavy"
    assert "lmcache" not in loaded and not {name for name in loaded if room(name) == "library"}
    assert other in beside and f"{PACKAGE}.memory.store" not in beside
    assert {name for name in beside if name.startswith(f"{PACKAGE}.library.")} == {f"{PACKAGE}.library.index"}
    rooms = {None, "errors", "settings", "artifact", "library", "memory", "engine"}
    assert {room(name) for name in loaded | beside} <= rooms
