"""The parts stay apart: who may import whom, and what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lmcache_cartridge

PACKAGE = "lmcache_cartridge"
ROOT = Path(lmcache_cartridge.__file__).parent
EDGE = {"cli", "demo", "doctor", "output"}
"""Modules directly in the package that are no core."""
FOREIGN = {"lmcache", "vllm", "transformers", "peft", "boto3", "safetensors"}
"""What the core knows nothing of."""
TORCH = {
    "catalog", "codec", "layout", "load_threads", "loader", "reader", "residency", "rope", "slab", "store", "tiers", "tiles",
}  # fmt: skip
"""Core modules that hold tensors."""


class _Import(NamedTuple):
    name: str
    """Absolute, `lmcache_cartridge.keys`."""
    at_load: bool
    """Whether it happens when the module itself is imported."""
    typing_only: bool


def _imports(source: str, module: str) -> list[_Import]:
    """Return every import of a module, wherever it stands."""
    return list(_walk(ast.parse(source), module, at_load=True, typing_only=False))


def _walk(node: ast.AST, module: str, *, at_load: bool, typing_only: bool) -> Iterator[_Import]:
    for child in ast.iter_child_nodes(node):
        inner_load = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner_typing = typing_only or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield _Import(alias.name, at_load, typing_only)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = module.split(".")[: -child.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in child.names:  # the name may be a module itself
                yield _Import(f"{base}.{alias.name}", at_load, typing_only)
        yield from _walk(child, module, at_load=inner_load, typing_only=inner_typing)


def _top(name: str) -> str:
    return name.partition(".")[0]


def _within(name: str) -> str | None:
    """Return the part of this package that an import names: `keys`, `serve`; None for other packages."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def _modules(folder: str = "") -> dict[str, list[_Import]]:
    return {
        path.stem: _imports(path.read_text(), ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]))
        for path in sorted((ROOT / folder).glob("*.py"))
    }


CORE = {name: imports for name, imports in _modules().items() if name not in EDGE}
PARTS = [path.name for path in sorted(ROOT.iterdir()) if (path / "__init__.py").exists()]


def test_the_reader_of_imports_misses_none() -> None:
    source = """
from __future__ import annotations
import a.b
from .keys import ChunkKey
from . import artifact
from ..store import Store
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import c
def f():
    import d
    class G:
        from e import f
class H:
    import g
try:
    import h
except ImportError:
    pass
"""
    found = _imports(source, f"{PACKAGE}.serve.backend")
    assert {i.name for i in found} == {
        "__future__.annotations", "a.b", f"{PACKAGE}.serve.keys.ChunkKey", f"{PACKAGE}.serve.artifact",
        f"{PACKAGE}.store.Store", "typing.TYPE_CHECKING", "c", "d", "e.f", "g", "h",
    }  # fmt: skip
    assert {i.name for i in found if not i.at_load} == {"d", "e.f"}
    assert {i.name for i in found if i.typing_only} == {"c"}


def test_there_is_a_core_to_look_at() -> None:
    assert {"errors", "manifest", "artifact", "registry", "keys", "layout", "residency", "store"} <= set(CORE)
    assert {"make", "serve"} <= set(PARTS)


@pytest.mark.parametrize("module", CORE)
def test_a_core_module_imports_core_modules_only(module: str) -> None:
    own = {_within(i.name) for i in CORE[module]} - {None}
    assert own <= set(CORE) | {"__version__", "CartridgeError"}


@pytest.mark.parametrize("module", CORE)
def test_a_core_module_knows_no_engine_and_no_cloud(module: str) -> None:
    allowed = {"boto3"} if module == "s3" else set()
    assert {_top(i.name) for i in CORE[module]} & (FOREIGN - allowed) == set()
    assert not [i for i in CORE[module] if _top(i.name) == "boto3" and i.at_load], "boto3 is imported when it is used"


@pytest.mark.parametrize("module", sorted(set(CORE) - TORCH))
def test_a_core_module_that_holds_no_tensors_imports_no_torch(module: str) -> None:
    assert "torch" not in {_top(i.name) for i in CORE[module]}


@pytest.mark.parametrize("module", sorted(set(CORE) - TORCH))
def test_a_core_module_that_holds_no_tensors_imports_none_that_does(module: str) -> None:
    assert {_within(i.name) for i in CORE[module] if not i.typing_only} & TORCH == set()


def test_core_modules_do_not_import_each_other_in_a_circle() -> None:
    needs = {
        m: {_within(i.name) for i in imports if not i.typing_only} & set(CORE) - {m} for m, imports in CORE.items()
    }
    while needs:
        ready = {module for module, wanted in needs.items() if not wanted & set(needs)}
        assert ready, f"a circle among {sorted(needs)}"
        for module in ready:
            del needs[module]


@pytest.mark.parametrize(("part", "other"), [("serve", "make"), ("make", "serve")])
def test_the_edges_do_not_import_each_other(part: str, other: str) -> None:
    offenders = [
        (module, i.name) for module, imports in _modules(part).items() for i in imports if _within(i.name) == other
    ]
    assert offenders == []


@pytest.mark.parametrize("part", sorted(set(PARTS) - {"commands"}))
def test_the_edges_do_not_import_the_command_line(part: str) -> None:
    offenders = [
        (module, i.name)
        for module, imports in _modules(part).items()
        for i in imports
        if _within(i.name) in {"cli", "commands", "demo", "doctor"}
    ]
    assert offenders == []


def test_the_connector_imports_no_lmcache_when_vllm_loads_it() -> None:
    early = [i.name for i in _modules("serve")["connector"] if i.at_load and not i.typing_only]
    assert not [name for name in early if _top(name) == "lmcache"]
    siblings = {name.split(".")[2] for name in early if name.startswith(f"{PACKAGE}.serve.")}
    for sibling in siblings & set(_modules("serve")):
        assert not [
            i for i in _modules("serve")[sibling] if _top(i.name) == "lmcache" and i.at_load and not i.typing_only
        ]


@pytest.mark.parametrize("module", ["cli", "output"])
def test_the_command_line_imports_nothing_heavy_when_it_starts(module: str) -> None:
    early = {_top(i.name) for i in _modules()[module] if i.at_load and not i.typing_only}
    assert early & (FOREIGN | {"torch", "numpy", "msgspec", "pydantic"}) == set()


def _loaded_by(code: str, *arguments: str) -> set[str]:
    """Return the top packages that a fresh Python has loaded after `code`, which may end by `SystemExit`."""
    report = (
        "import sys\ntry:\n    {}\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print('loaded', *sorted({{name.partition('.')[0] for name in sys.modules}}))"
    ).format(code.replace("\n", "\n    "))
    done = subprocess.run(
        [sys.executable, "-c", report, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


_HEAVY = {"torch", "vllm", "lmcache", "transformers", "boto3"}
_RUN_CLI = "from lmcache_cartridge.cli import main\nsys.exit(main(sys.argv[1:]))"


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded_by("import lmcache_cartridge")
    assert PACKAGE in loaded
    assert loaded & _HEAVY == set()


def test_help_loads_nothing_heavy() -> None:
    assert _loaded_by(_RUN_CLI, "--help") & _HEAVY == set()


def test_listing_loads_nothing_heavy(tmp_path: Path) -> None:
    loaded = _loaded_by(_RUN_CLI, "list", "--home", str(tmp_path / "home"))
    assert "sqlite3" in loaded
    assert loaded & _HEAVY == set()


def test_loading_torch_would_be_noticed() -> None:
    assert "torch" in _loaded_by("import lmcache_cartridge.layout")
