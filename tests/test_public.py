"""The public face: names that programs may rely on, each there, documented and typed, and none that loads torch too early."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lmcache_cartridge

ROOT = Path(__file__).parents[1]
NAMES = {
    "CartridgeError", "CausalModel", "CompactionWanted", "Library", "Manifest", "Recipe", "Registry", "Settings", "Task", "__version__", "build",
    "build_compact", "compact_cartridge", "compress", "engine_arguments", "from_cache", "import_cartridge", "load_manifest", "recognise", "train", "with_cartridges",
}  # fmt: skip
"""A name that goes missing here breaks programs of others."""
MYPY = """
[mypy]
python_version = 3.11
ignore_missing_imports = true
{skipped}
"""
PROGRAM = """
from pathlib import Path
from lmcache_cartridge import CartridgeError, CausalModel, Registry, Settings, build, compress, engine_arguments
settings = Settings(home=Path("home"))
registry = Registry(settings.registry_path)
version = registry.next_version("handbook", settings.cartridges_dir)
root = settings.cartridges_dir / "handbook" / str(version)
try:
    manifest = build(CausalModel("./llama"), Path("handbook.txt"), root, cartridge_id="handbook", version=version)
    small = compress(root, root.with_name("8"), cartridge_id="handbook", version=8)
except CartridgeError as error:
    raise SystemExit(str(error)) from None
registry.register(root)
options = engine_arguments(settings)
"""
WRONG = """
reveal_type(manifest.positions)
reveal_type(small.name)
reveal_type(options)
build("./llama", "handbook.txt")
settings.cpu_byte
"""


def test_the_names_are_these():
    assert set(lmcache_cartridge.__all__) == NAMES
    assert set(dir(lmcache_cartridge)) >= NAMES


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own
@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_name_is_there_and_says_what_it_does(name):
    assert len(inspect.getdoc(getattr(lmcache_cartridge, name)) or "") > 20


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'bild'"):
        lmcache_cartridge.bild  # noqa: B018


def test_a_program_of_ten_lines_is_type_checked(tmp_path):
    """With the libraries below left out, whose types take minutes: what is ours has to have types of its own."""
    left_out = "torch transformers vllm lmcache numpy boto3 botocore tqdm huggingface_hub".split()
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in left_out)
    (tmp_path / "mypy.ini").write_text(MYPY.format(skipped=skipped))
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(PROGRAM + WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports", "silent"]
    said = subprocess.run(
        [*command, "program.py", "wrong.py"], cwd=tmp_path, env={"MYPYPATH": str(ROOT), "PATH": ""}, text=True,
        capture_output=True, timeout=400,
    ).stdout  # fmt: skip
    assert "program.py" not in said, said
    for wanted in (
        'Revealed type is "int"',
        'Revealed type is "str"',
        'Revealed type is "dict[str, Any]"',
        'Argument 1 to "build" has incompatible type "str"; expected "CausalModel"',
        '"Settings" has no attribute "cpu_byte"',
    ):
        assert wanted in said, said
