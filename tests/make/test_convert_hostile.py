"""Files that want to do harm: nothing in them runs, nothing they declare is allocated, and each gets a clear error."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import stored_kv

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.errors import CartridgeError, ForeignFormatError
from lmcache_cartridge.make.foreign import pickle as pickle_reader
from lmcache_cartridge.make.foreign.convert import import_
from lmcache_cartridge.make.foreign.pickle import load
from lmcache_cartridge.make.foreign.recognise import recognise
from lmcache_cartridge.make.model import CausalModel

P = 16
HUGE = 1 << 40


@pytest.fixture(scope="module")
def model():
    return CausalModel(str(MODEL_DIR))


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


# Pickles written by hand, as the unpickler reads them.


def _global(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + f"{module}\n{attribute}\n".encode()


def _number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _call(name: str, *arguments: bytes) -> bytes:
    return _global(name) + _tuple(*arguments) + b"R"


def _storage(count: int, *, key: str = "0", kind: str = "torch.BFloat16Storage") -> bytes:
    return _tuple(_text("storage"), _global(kind), _text(key), _text("cpu"), _number(count)) + b"Q"


def _tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], *, offset: int = 0, storage: bytes | None = None
) -> bytes:
    sizes, steps = (_tuple(*map(_number, numbers)) for numbers in (shape, strides))
    hooks = _call("collections.OrderedDict")
    return _call(
        "torch._utils._rebuild_tensor_v2", storage or _storage(1024), _number(offset), sizes, steps, b"\x89", hooks
    )


def _layers(tensor: bytes) -> bytes:
    return b"](" + _tuple(tensor, tensor) * 3 + b"e"


def _archive(
    path: Path, pickled: bytes, *, records: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> Path:
    """Write a file as `torch.save` lays it out, around any pickle."""
    entries = {"data.pkl": b"\x80\x02" + pickled + b".", "byteorder": b"little", "version": b"3\n"}
    entries |= {f"data/{key}": data for key, data in (records or {"0": bytes(2048)}).items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(f"a/{name}", data)
    return path


SHAPE, STRIDES = (1, 2, 8, 64), (1024, 512, 64, 1)


def test_a_pickle_written_by_hand_is_read(tmp_path):
    """Or else the refusals below would prove nothing."""
    found = load(_archive(tmp_path / "a.pt", _layers(_tensor(SHAPE, STRIDES))))
    assert [tuple(t.shape) for pair in found for t in pair] == [SHAPE] * 6


class Everything(set):
    """A list of names that every name is on."""

    def __rsub__(self, names: object) -> set[str]:
        return set()


def _bomb(where: str, path: Path, mark: Path) -> Path:
    bomb, kv = Calls(os.mkdir, str(mark)), foreign.random_kv(P)
    content: Any = [bomb]
    if where == "parameters":
        parts = torch.nn.ParameterList([torch.nn.Parameter(t) for t in foreign.htd(kv)[0]])
        parts.__dict__["_size"] = bomb
        content = {"trainable_keys": parts}
    elif where == "beside":
        content = {"trainable_keys": foreign.htd(kv)[0], "metadata": {"a": [{"b": (bomb,)}]}}
    if where == "bare":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, pickle_protocol=4 if where == "protocol 4" else 2,
                   _use_new_zipfile_serialization=where != "before 1.6")  # fmt: skip
    return path


NAMED = r"wants .*posix\.mkdir"
BOMBS = {
    "alone": NAMED,
    "beside": NAMED,
    "parameters": NAMED,
    "protocol 4": "Unsupported operand",
    "bare": "not a zip file",
    "before 1.6": "not a zip file. torch.save has written zip archives since 1.6",
}


@pytest.mark.parametrize("where", BOMBS)
def test_a_bomb_is_refused_and_does_not_go_off(tmp_path, where):
    path, mark = _bomb(where, tmp_path / "a.pt", tmp_path / "ran"), tmp_path / "ran"
    with pytest.raises(ForeignFormatError, match=f"not a PyTorch file of plain tensors: .*{BOMBS[where]}") as caught:
        recognise(path)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    pickle.loads(path.read_bytes()) if where == "bare" else foreign.quiet_load(path)
    assert mark.exists(), "the bomb was no bomb"


def test_a_bomb_in_the_pickled_weights_of_an_adapter_does_not_go_off(tmp_path):
    directory = foreign.peft_adapter(foreign.random_kv(P), tmp_path / "a", safe=False)
    _bomb("alone", directory / "adapter_model.bin", tmp_path / "ran")
    with pytest.raises(ForeignFormatError, match=r"adapter_model.bin.*posix\.mkdir"):
        recognise(directory)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "builtins.getattr", "__builtin__.exec", "torch.load", "torch.Tensor", "torch.FloatTensor",
     "numpy.core.multiarray._reconstruct", "torch._utils._rebuild_sparse_tensor", "torch._tensor._rebuild_from_type_v2",
     "torch.storage.UntypedStorage", "collections.Counter", "torch.nn.parameter.Parameter"],
)  # fmt: skip
def test_a_name_beyond_the_shortest_list_is_refused_before_it_is_called(tmp_path, name):
    path = _archive(tmp_path / "a.pt", _call(name, _number(HUGE)))
    expected = name.replace("__builtin__", "builtins")
    with pytest.raises(ForeignFormatError, match=rf"it wants {expected.replace('.', '[.]')}, which may run anything"):
        load(path)


def _lying_directory(path: Path, sizes: int = 8) -> Path:
    """Write an archive whose directory gives one entry's size as 4 GB, or the size that it has when it is packed."""
    foreign.pairs(foreign.random_kv(P), path)
    raw = bytearray(path.read_bytes())
    at = raw.rindex(b"data/0") - 46
    raw[at + 20 : at + 20 + sizes] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)[:sizes]
    path.write_bytes(raw)
    return path


def _doubled(path: Path) -> Path:
    foreign.pairs(foreign.random_kv(P), path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], b"\x80\x02cos\nsystem\n.")
    return path


def _flipped(path: Path) -> Path:
    """Change one bit of a tensor."""
    foreign.pairs(foreign.random_kv(P), path)
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data/3"))
        offset = path.read_bytes().index(archive.read(name))
    raw = bytearray(path.read_bytes())
    raw[offset + 100] ^= 4
    path.write_bytes(raw)
    return path


def _parts(state: bytes) -> bytes:
    parameters = _global("torch.nn.modules.container.ParameterList") + b")\x81" + state + b"b"
    return b"}(" + _text("trainable_keys") + parameters + _text("trainable_values") + b"]u"


def _weights(path: Path, raw: bytes) -> Path:
    directory = foreign.peft_adapter(foreign.random_kv(P), path.parent / "adapter")
    (directory / "adapter_model.safetensors").write_bytes(raw)
    return directory


def _header(shape: list[int], end: int, data: int) -> bytes:
    text = json.dumps({"prompt_embeddings": {"dtype": "BF16", "shape": shape, "data_offsets": [0, end]}}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _config(path: Path, text: str) -> Path:
    directory = foreign.peft_adapter(foreign.random_kv(P), path.parent / "adapter")
    (directory / "adapter_config.json").write_text(text)
    return directory


def _empty_archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/version", "3\n")
    return path


HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "huge storage": (
        lambda p: _archive(p, _layers(_tensor((1, 2, HUGE, 64), (0, HUGE * 64, 64, 1), storage=_storage(HUGE * 128)))),
        "larger than what the file holds"),
    "huge tensor of no bytes": (
        lambda p: _archive(p, _layers(_tensor((1, 2, HUGE, 64), (0, 0, 0, 1)))), "declare .* bytes, the file has"),
    "more tensor than storage": (lambda p: _archive(p, _layers(_tensor((1, 2, 16, 64), (2048, 1024, 64, 1)))),
                                 "larger than what the file holds"),
    "more storage than record": (
        lambda p: _archive(p, _layers(_tensor((1, 2, HUGE >> 20, 64), (0, 64 * (HUGE >> 20), 64, 1),
                                              storage=_storage(HUGE >> 13)))), "larger than what the file holds"),
    "no such record": (lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, storage=_storage(1024, key="7")))), "data/7"),
    "a record elsewhere": (
        lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, storage=_storage(1024, key="../../../etc/passwd")))), "passwd"),
    "an offset beyond": (lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, offset=1))), "larger than what the file holds"),
    "a negative offset": (lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, offset=-64))), "offset|negative"),
    "a negative size": (lambda p: _archive(p, _layers(_tensor((1, 2, -8, 64), STRIDES))), "overflow"),
    "a negative stride": (lambda p: _archive(p, _layers(_tensor(SHAPE, (1024, 512, -64, 1)))), "overflow"),
    "a negative storage": (lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, storage=_storage(-5)))), "plain tensors"),
    "complex numbers": (
        lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES, storage=_storage(9, kind="torch.ComplexFloatStorage")))),
        "it wants torch.ComplexFloatStorage"),
    "integers": (
        lambda p: _archive(p, _layers(_tensor((1, 2, 1, 64), (128, 64, 64, 1), storage=_storage(128, kind="torch.LongStorage"))),
                           records={"0": bytes(1 << 13)}),
        "KV of dtype int64"),
    "a storage as a tensor": (lambda p: _archive(p, _layers(_storage(1024))), "KV is not a tensor of keys and one of values"),
    "ids of no bytes": (
        lambda p: _archive(p, b"}" + _text("token_ids") + _tensor((HUGE,), (0,), storage=_storage(256, kind="torch.LongStorage"))
                           + b"s"), "not a list of at least one whole number"),
    "lists a million deep": (lambda p: _archive(p, b"]" * 1_000_000 + b"a" * 1_000_000), "plain tensors|no known"),
    "tuples a million deep": (
        lambda p: _archive(p, b"}N" + b"\x85" * 1_000_000 + b"Ns"), "1000000 tuples in its pickle, more than"),
    "a pickle too large": (lambda p: _archive(p, _text("a" * (9 << 20))), "no one data.pkl of at most"),
    "no pickle": (_empty_archive, "no one data.pkl"),
    "a pickle cut off": (lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES))[:-40] + b"("), "plain tensors|broken"),
    "compressed": (
        lambda p: _archive(p, _layers(_tensor(SHAPE, STRIDES)), compression=zipfile.ZIP_DEFLATED, records={"0": bytes(1 << 28)}),
        "is compressed, which torch.save never does"),
    "a lying directory": (_lying_directory, r"declares \d+ bytes|plain tensors"),
    "an entry of two sizes": (lambda p: _lying_directory(p, 4), "is compressed, which torch.save never does"),
    "the same entry twice": (_doubled, "is there twice"),
    "a flipped bit": (_flipped, "does not have the checksum"),
    "a parameter list of nothing": (lambda p: _archive(p, _parts(b"}")), "no known form|plain tensors"),
    "a parameter list of text": (
        lambda p: _archive(p, _parts(b"}" + _text("_parameters") + _text("abc") + b"s")), "no known form"),
    "a parameter list of a huge length": (
        lambda p: _archive(p, _parts(b"}(" + _text("_size") + _number(HUGE) + _text("_parameters") + b"}"
                                     + _text("0") + b"Nsu")), "no known form"),
    "an empty file": (lambda p: p.write_bytes(b"") and p or p, "plain tensors"),
    "text": (lambda p: p.write_text("hello") and p, "plain tensors"),
    "a directory named so": (lambda p: p.mkdir() or p, "no known format"),
    "safetensors, header of 8 exabytes": (lambda p: _weights(p, (1 << 63).to_bytes(8, "little") + b"{}"), "not a sound safetensors"),
    "safetensors, more than there is": (lambda p: _weights(p, _header([P, 768], P * 768 * 2, 10)), "not a sound safetensors"),
    "safetensors, huge shape": (lambda p: _weights(p, _header([HUGE, 768], 100, 100)), "not a sound safetensors"),
    "safetensors, overflow": (lambda p: _weights(p, _header([1 << 62, 1 << 62], 100, 100)), "not a sound safetensors"),
    "safetensors, other shape": (lambda p: _weights(p, _header([768, P], P * 768 * 2, P * 768 * 2)), r"shape \(768, 16\)"),
    "config, deep": (lambda p: _config(p, "[" * 200_000), "no JSON"),
    "config, a list": (lambda p: _config(p, "[]"), "not a PEFT configuration"),
    "config, huge number": (lambda p: _config(p, '{"peft_type": "CARTRIDGE", "num_virtual_tokens": ' + "9" * 9999 + "}"), "no JSON"),
    "config, p of 10^30": (
        lambda p: foreign.edit_config(_config(p, "{}"), peft_type="CARTRIDGE", num_virtual_tokens=10**30), "not a positive number"),
}  # fmt: skip


def _import(model: CausalModel, path: Path, root: Path, **options: Any) -> None:
    import_(model, recognise(path), root, cartridge_id="it", version=1, chunk_tokens=16, **options)


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


@pytest.mark.parametrize("keep", [1, 30, 100, 500, -1, -22, -23, -100, -1000])
def test_a_truncated_file_is_refused(model, tmp_path, keep):
    path = foreign.hazy(foreign.random_kv(P), tmp_path / "a.pt")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ForeignFormatError):
        _import(model, path, tmp_path / "out")


def test_names_that_climb_out_of_the_archive_write_nothing(model, tmp_path):
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    path = foreign.pairs(foreign.random_kv(P), inner / "a.pt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../evil", b"x")
        archive.writestr("/evil", b"x")
    before = {p for p in tmp_path.rglob("*") if "out" not in p.parts}
    try:
        _import(model, path, tmp_path / "out")
    except ForeignFormatError:
        assert not (tmp_path / "out").exists()
    assert {p for p in tmp_path.rglob("*") if p.parts[-2] != "out" and p.name != "out"} == before
    assert not Path("/evil").exists()


def test_torch_alone_would_not_have_run_anything_either(tmp_path, monkeypatch):
    """The list of names is the first lock; `weights_only` is the second, and holds without the first."""
    monkeypatch.setattr(pickle_reader, "ALLOWED", Everything())
    for where in ("alone", "beside", "parameters", "protocol 4"):
        path = _bomb(where, tmp_path / "a.pt", tmp_path / "ran")
        with pytest.raises(ForeignFormatError):
            recognise(path)
        assert not (tmp_path / "ran").exists()


# Valid files with something changed: an error of ours, or a right import; never another error, never a crash.

MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "zero", "copy", "insert"]), st.integers(0, 1 << 30), st.integers(1, 64),
              st.integers(1, 255)),
    min_size=1, max_size=4,
)  # fmt: skip
FUZZ = settings(
    max_examples=100, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def _mutate(data: bytes, mutations: list[tuple[str, int, int, int]]) -> bytes:
    raw = bytearray(data)
    for kind, place, length, value in mutations:
        at = place % max(len(raw), 1)
        if kind == "flip":
            raw[at : at + 1] = bytes(b ^ value for b in raw[at : at + 1])
        elif kind == "cut":
            del raw[at : at + length]
        elif kind == "zero":
            raw[at : at + length] = bytes(len(raw[at : at + length]))
        elif kind == "copy":
            raw[at:at] = raw[max(0, at - length) : at]
        else:
            raw[at:at] = bytes([value]) * length
    return bytes(raw)


class _Bench:
    """Valid files, made once, and a place to try changed ones."""

    def __init__(self, root: Path, model: CausalModel) -> None:
        self.root, self.model, self.runs, self.taken = root, model, 0, 0
        self.kv = foreign.random_kv(P)
        self.adapter = foreign.peft_adapter(self.kv, root / "adapter")
        self.files = {
            "hazy": foreign.hazy(self.kv, root / "hazy.pt").read_bytes(),
            "pairs": foreign.pairs(self.kv, root / "pairs.pt").read_bytes(),
        } | {name: (self.adapter / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")}

    def changed(self, name: str, mutations: list) -> Path:
        """Write one of the files, its pickle alone, or the adapter that it is of, with something changed."""
        name, _, only = name.partition(" ")
        if name.startswith("adapter"):
            for file, end in (("adapter_model.safetensors", 200), ("adapter_config.json", None)):
                data = self.files[file]  # of the weights little but the header: of their numbers any are KV
                is_it = file == name
                (self.adapter / file).write_bytes(
                    _mutate(data[:end], mutations) + data[len(data[:end]) :] if is_it else data
                )
            return self.adapter
        path = self.root / "changed.pt"
        if not only:
            path.write_bytes(_mutate(self.files[name], mutations))
            return path
        with zipfile.ZipFile(io.BytesIO(self.files[name])) as sound, zipfile.ZipFile(path, "w") as archive:
            for entry in sound.namelist():
                data = sound.read(entry)
                archive.writestr(entry, _mutate(data, mutations) if entry.endswith("data.pkl") else data)
        return path

    def attempt(self, path: Path) -> Path | None:
        """Import a file, every eighth time with a canary; return the artefact's place, or None where it was refused."""
        self.runs += 1
        out = self.root / "out" / str(self.runs)
        try:
            _import(self.model, path, out, compare=self.runs % 8 == 0)
        except CartridgeError as error:
            assert "\n" not in str(error)
            assert not out.exists()
            return None
        self.taken += 1
        list(reading.verify(out))
        return out


@pytest.fixture(scope="module")
def bench(tmp_path_factory, model):
    return _Bench(tmp_path_factory.mktemp("bench"), model)


@pytest.mark.parametrize(
    "name", ["hazy", "pairs", "hazy pickle", "pairs pickle", "adapter_model.safetensors", "adapter_config.json"]
)
def test_a_changed_file_is_refused_or_read_as_torch_and_safetensors_read_it(bench, name):
    """An archive's checksums cover every byte that counts, and an adapter's configuration holds no KV."""
    bench.taken = 0

    @FUZZ
    @given(MUTATIONS)
    def run(mutations: list) -> None:
        out = bench.attempt(bench.changed(name, mutations))
        if out is not None and name in ("hazy", "pairs", "adapter_config.json"):
            assert torch.equal(stored_kv(out), bench.kv)

    run()
    assert bench.taken, "nothing was ever taken: this would pass a reader that refuses everything"


@FUZZ
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-5, 700) | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["token_ids", "kv_cache", "trainable_keys", "trainable_values", "frozen_keys", "fixed_keys", "metadata",
                             "layers.0.attention.prefix.keys", "k", "v"]), inner, max_size=4),
        max_leaves=12,
    )
)  # fmt: skip
def test_any_plain_content_is_refused_or_token_ids(bench, content):
    torch.save(content, bench.root / "plain.pt")
    (bench.root / "plain.json").write_text(json.dumps(content))
    for name in ("plain.pt", "plain.json"):
        out = bench.attempt(bench.root / name)
        assert out is None or reading.load_manifest(out).kind == "tokens"
