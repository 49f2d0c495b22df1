"""Files that want to do harm: nothing in them runs, nothing they declare is allocated, and each gets a clear error."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import foreign
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import stored_kv

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.errors import CartridgeError, ForeignFormatError
from lmcache_cartridge.make.foreign import pickle as pickle_reader
from lmcache_cartridge.make.foreign.convert import import_
from lmcache_cartridge.make.foreign.pickle import load
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel

P = 16
HUGE = 1 << 40


def _peak_bytes() -> int:
    """Return the most address space this process ever had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak"))
    return 1024 * int(line.split()[1])


class Calls:
    """Calls a function when unpickled without care."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple:
        return self._call


class Storage(NamedTuple):
    """What a file says of the numbers of a tensor."""

    count: int = 1024
    key: str = "0"


def _layers(size: Any = (1, 2, 8, 64), strides: Any = (1024, 512, 64, 1), offset: int = 0, **storage: Any) -> Any:
    """Return KV that is pickled as torch pickles tensors, of whatever sizes it declares."""
    rebuild = torch._utils._rebuild_tensor_v2
    tensor = Calls(rebuild, Storage(**storage), offset, size, strides, False, OrderedDict())
    return [(tensor, tensor)] * 3


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        return ("storage", torch.BFloat16Storage, thing.key, "cpu", thing.count) if isinstance(thing, Storage) else None


def _archive(path: Path, content: Any, *, packed: bool = False) -> Path:
    """Write a file as `torch.save` lays it out, around anything, or around what is a pickle already."""
    pickled = io.BytesIO()
    if not isinstance(content, bytes):
        _Pickler(pickled, 2).dump(content)
    entries = {
        "data.pkl": pickled.getvalue() or content,
        "byteorder": b"little",
        "version": b"3\n",
        "data/0": bytes(2048),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(f"a/{name}", data)
    return path


def test_a_pickle_written_by_hand_is_read(tmp_path):
    """Or else the refusals below would prove nothing."""
    found = load(_archive(tmp_path / "a.pt", _layers()))
    assert [tuple(t.shape) for pair in found for t in pair] == [(1, 2, 8, 64)] * 6


def _bomb(where: str, path: Path, mark: Path) -> Path:
    bomb = Calls(os.mkdir, str(mark))
    content: Any = [bomb]
    if where == "parameters":
        parts = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1))])
        parts.__dict__["_size"] = bomb
        content = {"trainable_keys": parts}
    torch.save(content, path, pickle_protocol=4 if where == "protocol 4" else 2,
               _use_new_zipfile_serialization=where != "before 1.6")  # fmt: skip
    return path


NAMED = r"wants .*posix\.mkdir"
BOMBS = {
    "alone": NAMED,
    "parameters": NAMED,
    "protocol 4": "Unsupported operand",
    "before 1.6": "not a zip file",
}


@pytest.mark.parametrize("where", BOMBS)
def test_a_bomb_is_refused_and_does_not_go_off(tmp_path, where):
    path, mark = _bomb(where, tmp_path / "a.pt", tmp_path / "ran"), tmp_path / "ran"
    with pytest.raises(ForeignFormatError, match=f"not a PyTorch file of plain tensors: .*{BOMBS[where]}") as caught:
        recognise(path)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    foreign.quiet_load(path)
    assert mark.exists(), "the bomb was no bomb"


def test_a_bomb_in_the_pickled_weights_of_an_adapter_does_not_go_off(tmp_path):
    directory = foreign.peft_adapter(foreign.random_kv(P), tmp_path / "a", safe=False)
    _bomb("alone", directory / "adapter_model.bin", tmp_path / "ran")
    with pytest.raises(ForeignFormatError, match=r"adapter_model.bin.*posix\.mkdir"):
        recognise(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.getattr", "__builtin__.exec", "torch.load", "numpy.core.multiarray._reconstruct",
     "torch._utils._rebuild_sparse_tensor", "torch.ComplexFloatStorage", "collections.Counter"],
)  # fmt: skip
def test_a_name_beyond_the_shortest_list_is_refused_before_it_is_called(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    path = _archive(tmp_path / "a.pt", f"\x80\x02c{module}\n{attribute}\n)R.".encode("latin-1"))
    expected = name.replace("__builtin__", "builtins")
    with pytest.raises(ForeignFormatError, match=rf"it wants {expected.replace('.', '[.]')}, which may run anything"):
        load(path)


def _lying_directory(path: Path) -> Path:
    """Write an archive whose directory gives one entry's size as 4 GB."""
    foreign.pairs(foreign.random_kv(P), path)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"data/0") - 46
    raw[at + 20 : at + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    path.write_bytes(raw)
    return path


def _more(path: Path, *names: str) -> Path:
    """Write an archive with further entries."""
    foreign.pairs(foreign.random_kv(P), path)
    with zipfile.ZipFile(path, "a") as archive:
        for name in names:
            archive.writestr(name, b"\x80\x02cos\nsystem\n.")
    return path


def _endless(path: Path) -> Path:
    """Write a list of parameters that says that it has very many."""
    parts = torch.nn.ParameterList()
    vars(parts).update(_size=HUGE, _parameters={"0": None})
    torch.save({"trainable_keys": parts, "trainable_values": []}, path)
    return path


def _saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def _adapter(path: Path, file: str, content: bytes) -> Path:
    directory = foreign.peft_adapter(foreign.random_kv(P), path.parent / "adapter")
    (directory / file).write_bytes(content)
    return directory


LARGER = "not resizable"
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "huge storage": ({"size": (1, 2, HUGE, 64), "strides": (0, HUGE * 64, 64, 1), "count": HUGE * 128}, LARGER),
    "huge tensor of no bytes": ({"size": (1, 2, HUGE, 64), "strides": (0, 0, 0, 1)}, "declare .* bytes, the file has"),
    "no such record": ({"key": "7"}, "data/7"),
    "a negative offset": ({"offset": -64}, "offset|negative"),
}
ONE = torch.ones(1, dtype=torch.int64)
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    **{name: (lambda p, lie=lie: _archive(p, _layers(**lie)), said) for name, (lie, said) in LIES.items()},
    "ids of no bytes": (lambda p: _saved(p, {"token_ids": ONE.expand(HUGE)}), "not a list of at least one whole number"),
    "lists in lists": (lambda p: _archive(p, b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."), "not a tensor of keys"),
    "tuples in tuples": (
        lambda p: _archive(p, b"\x80\x02}N" + b"\x85" * 200_000 + b"Ns."), "200000 tuples in its pickle, more than"),
    "a pickle too large": (lambda p: _archive(p, "a" * (9 << 20)), "no one data.pkl of at most"),
    "compressed": (lambda p: _archive(p, ["a" * (1 << 22)], packed=True), "is compressed, which torch.save never does"),
    "a lying directory": (_lying_directory, "plain tensors"),
    "two pickles": (lambda p: _more(p, "b/data.pkl"), "no one data.pkl"),
    "a name that climbs out": (lambda p: _more(p, "../../evil"), "file in archive is not"),
    "a parameter list of a huge length": (_endless, "no known form"),
    "safetensors, header of 8 exabytes": (
        lambda p: _adapter(p, "adapter_model.safetensors", (1 << 63).to_bytes(8, "little")), "not a sound safetensors"),
    "config, deep": (lambda p: _adapter(p, "adapter_config.json", b"[" * 200_000), "Expected `object`"),
}  # fmt: skip


def _import(model: CausalModel, path: Path, root: Path) -> None:
    import_(model, recognise(path), root, cartridge_id="it", version=1, chunk_tokens=16, compare=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_in_one_sentence_and_takes_no_memory(model, tmp_path, name):
    make, message = HOSTILE[name]
    path = make(tmp_path / "a.pt")
    before = _peak_bytes()
    with pytest.raises(CartridgeError, match=message) as caught:
        _import(model, path, tmp_path / "out")
    assert _peak_bytes() - before < 1 << 30
    assert len(str(caught.value)) < 1000 + len(str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(ForeignFormatError, match="is there twice"):
        load(_more(tmp_path / "a.pt", "a/data.pkl"))


def test_torch_alone_would_not_have_run_anything_either(tmp_path, monkeypatch):
    """The list of names is the first lock; `weights_only` is the second, and holds without the first."""

    class Everything(set):
        def __rsub__(self, names: object) -> set[str]:
            return set()

    monkeypatch.setattr(pickle_reader, "ALLOWED", Everything())
    for where in ("alone", "parameters"):
        path = _bomb(where, tmp_path / "a.pt", tmp_path / "ran")
        with pytest.raises(ForeignFormatError):
            recognise(path)
        assert not (tmp_path / "ran").exists()


# Valid files with something changed: an error of ours, or a right import; never another error, never a crash.

CHANGES = st.lists(
    st.tuples(st.integers(0, 1 << 30), st.none() | st.integers(0, 64), st.binary(max_size=8)), min_size=1, max_size=4
)
"""Where, how many bytes go, or as many as come, and what takes their place."""
FUZZ = settings(
    max_examples=60, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def _changed(data: bytes, changes: list[tuple[int, int | None, bytes]]) -> bytes:
    raw = bytearray(data)
    for place, length, new in changes:
        at = place % (len(raw) + 1)
        raw[at : at + (len(new) if length is None else length)] = new
    return bytes(raw)


def _attempt(model: CausalModel, path: Path, out: Path) -> bool:
    """Whether a file is taken and sound, or else refused in a line, with nothing left."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        _import(model, path, out)
    except CartridgeError as error:
        assert "\n" not in str(error)
        assert not out.exists()
        return False
    return bool(list(reading.verify(out)))


@pytest.mark.parametrize("part", ["file", "pickle"])
def test_a_changed_file_is_refused_or_read_as_torch_reads_it(model, tmp_path, part):
    """An archive's checksums cover every byte that counts."""
    kv, path, is_taken = foreign.random_kv(P), tmp_path / "a.pt", []
    sound = foreign.hazy(kv, path).read_bytes()

    @FUZZ
    @given(CHANGES)
    def run(changes: list) -> None:
        path.write_bytes(_changed(sound, changes))
        if part == "pickle":
            with zipfile.ZipFile(io.BytesIO(sound)) as before, zipfile.ZipFile(path, "w") as archive:
                for entry in before.namelist():
                    data = before.read(entry)
                    archive.writestr(entry, _changed(data, changes) if entry.endswith("data.pkl") else data)
        is_taken.append(_attempt(model, path, tmp_path / "out"))
        assert part == "pickle" or not is_taken[-1] or torch.equal(stored_kv(tmp_path / "out"), kv)

    run()
    assert any(is_taken), "this would pass a reader that refuses everything"
