"""LoRA adapters by their content: what their digest is of, what the model computes with one, whom cartridges go to."""

from __future__ import annotations

import asyncio
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from blocks import quietly
from homes import Home
from making import make_fingerprint
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from wards import MODEL, prefill

from lmcache_cartridge.artifact.weights import CONFIG, WEIGHTS, adapter_digest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.train.trainer import wrap
from lmcache_cartridge.serve.request import Reference, Refusal
from lmcache_cartridge.serve.resolve import Resolver, Selection
from lmcache_cartridge.settings import from_mapping

with quietly():
    from vllm.lora.request import LoRARequest

    from lmcache_cartridge.serve.adapters import Adapters, check

IDS = list(range(10, 90))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_adapter(tmp_path_factory.mktemp("adapters") / "one", 1)


@pytest.fixture
def directory(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "one"))


def _configure(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | fields))


def _change_a_weight(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    next(iter(tensors.values()))[0, 0] += 1
    save_file(tensors, directory / WEIGHTS)


def _rename_weights(directory: Path) -> None:
    save_file({f"{name}x": tensor for name, tensor in load_file(directory / WEIGHTS).items()}, directory / WEIGHTS)


# The digest.


@pytest.mark.parametrize(
    "change",
    [_change_a_weight, *(lambda d, f=f: _configure(d, **f) for f in (
        {"lora_alpha": 33}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"q_proj": 4}},
        {"target_modules": ["q_proj"]},
    ))],
)  # fmt: skip
def test_all_that_an_adapter_computes_with_is_in_its_digest(directory, change):
    before = adapter_digest(directory)
    change(directory)
    assert adapter_digest(directory) != before


def test_how_an_adapter_was_written_is_not_in_its_digest(directory):
    before = adapter_digest(directory)
    _configure(directory, target_modules=["o_proj", "v_proj", "k_proj", "q_proj"], lora_dropout=0.5, task_type="X")
    save_file(load_file(directory / WEIGHTS), directory / WEIGHTS, metadata={"format": "np"})
    assert adapter_digest(Path(shutil.move(directory, directory.with_name("moved")))) == before


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"peft_type": "LOHA"}, "type LOHA"), ({"use_dora": True}, "use_dora"), ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"init_lora_weights": "pissa"}, "pissa"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ],
)  # fmt: skip
def test_an_adapter_that_engines_compute_otherwise_is_refused(directory, fields, why):
    _configure(directory, **fields)
    with pytest.raises(UnsupportedModel, match=why):
        CausalModel(MODEL, lora=directory)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_is_no_adapter_is_refused(directory, name):
    (directory / name).write_bytes((directory / name).read_bytes()[:20])
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        adapter_digest(directory)
    (directory / name).unlink()
    with pytest.raises(UnsupportedModel, match=f"it has no {name}"):
        adapter_digest(directory)


@pytest.mark.parametrize("change", [_rename_weights, lambda directory: _configure(directory, r=4)])
def test_an_adapter_of_another_model_is_refused(directory, change):
    change(directory)
    with pytest.raises(UnsupportedModel, match="not of this model"):
        CausalModel(MODEL, lora=directory)


def _tensor(**fields: Any) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields}).encode()


@pytest.mark.parametrize(
    "header",
    [
        None, b"[" * 100_000, b"[1]", b"null", b'{"x": 1}', b"\xff\xfe", b'{"x": {"dtype": "F32", "shape": [1]}}',
        *(_tensor(data_offsets=offsets) for offsets in ([0, 1 << 46], [-9, 4], None, [1 << 70, 1 << 71])),
    ],
)  # fmt: skip
def test_weights_that_are_none_cost_no_more_than_their_size(directory, header):
    """A file of ten bytes asked for 64 TiB, and that error nobody caught."""
    length = (1 << 46 if header is None else len(header)).to_bytes(8, "little")
    (directory / WEIGHTS).write_bytes(length + (header or b"") + b"{}")
    tracemalloc.start()
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        adapter_digest(directory)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20


# What the model computes.


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_kv_is_that_of_weights_with_the_adapter_added(tmp_path, options):
    """The reference adds alpha / r times B A to the weights (of rsLoRA alpha over the root of r), without PEFT."""
    path = write_adapter(tmp_path / "a", 2, lora_alpha=24, **options)
    found, base = CausalModel(MODEL, dtype="float32", lora=path), CausalModel(MODEL, dtype="float32")
    assert [line[:6] for line in found.fingerprint.differences(base.fingerprint)] == ["lora: "]
    plain, tensors = prefill(base, IDS), load_file(path / WEIGHTS)
    weights = dict(base.model.named_parameters())
    for name, down in tensors.items():
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[target].data += 24 / (8**0.5 if options else 8) * up @ down
    assert (prefill(found, IDS) - prefill(base, IDS)).abs().max() < 1e-3
    assert (prefill(found, IDS) - plain).abs().max() > 1, "the control: the adapter changes KV"


def test_a_cartridge_is_trained_for_the_adapter_and_the_adapter_is_not(written):
    model = CausalModel(MODEL, dtype="float32", lora=written)
    kv = prefill(model, IDS)
    peft = wrap(model, kv[:, :, :16])
    assert torch.equal(prefill(model, IDS), kv)
    trained = [name for name, parameter in peft.named_parameters() if parameter.requires_grad]
    assert trained and all(name.startswith("prompt_encoder.") for name in trained)


def test_commands_make_cartridges_of_an_adapter(written, tmp_path, capsys):
    document = tmp_path / "a.txt"
    document.write_text("Patient Mora: blood AB+, ward 7, allergy latex. " * 8)

    def run(*command: str) -> Any:
        assert main([*command, "--home", str(tmp_path / "home"), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    model = ["--model", MODEL, "--lora", str(written)]
    run("build", *model, "--document", str(document), "--id", "whole", "--chunk-size", "16")
    run("build", "--from", "whole", *model, "--id", "short", "--compact", "2x", "--accept", "0")
    assert {row["id"]: row["lora"] for row in run("list")} == {"whole": "one", "short": "one"}
    for name in ("whole", "short"):
        shown = run("show", name)
        assert (shown["fingerprint"]["lora"], shown["provenance"]["lora"]) == (adapter_digest(written), "one")
    for command in (["build", "--from", "whole", "--model", MODEL, "--id", "x", "--compact", "2x"],
                    ["export", "whole", "--to", "peft", "--output", str(tmp_path / "out")]):  # fmt: skip
        assert main([*command, "--home", str(tmp_path / "home")]) == 1
        assert "lora" in capsys.readouterr().err.lower()


# Whom cartridges go to.


def _selection(home: Home, *names: str) -> Selection:
    return Resolver(from_mapping({"home": home.path})).resolve([Reference(id=name) for name in names])


async def _problem(adapters: Adapters, selection: Selection, model: str) -> str:
    try:
        check(selection, await adapters.of(model))
    except Refusal as refusal:
        assert refusal.status == (503 if "is being loaded" in str(refusal) else 422)
        return str(refusal)
    return ""


def test_a_request_gets_what_was_made_with_the_adapter_that_vllm_has_loaded(home, directory):
    home.make("base")
    home.make("one", fingerprint=replace(make_fingerprint(), lora=adapter_digest(directory)))
    base, one = _selection(home, "base"), _selection(home, "one")
    with pytest.raises(Refusal, match="no chain"):
        _selection(home, "base", "one")
    served: dict[str, LoRARequest] = {}
    adapters = Adapters(served)

    async def work() -> None:
        async def load(path: Path, meanwhile: Callable[[], Any] = lambda: None) -> None:
            request = LoRARequest("a", 1, str(path), load_inplace=True)

            async def loading(_: LoRARequest) -> bool:
                if served:
                    assert "is being loaded" in await _problem(adapters, one, "a")
                meanwhile()
                return True

            assert await adapters.load(loading, request)
            served["a"] = request

        await load(directory)
        assert await _problem(adapters, one, "a") == await _problem(adapters, base, "m") == ""
        assert "made with the base model" in await _problem(adapters, base, "a")
        assert await _problem(adapters, one, "m")
        stored_prompt = base._replace(manifests=(replace(base.manifests[0], kind="tokens"),), computed=1)
        assert await _problem(adapters, stored_prompt, "a") == "", "token ids go with any"
        with pytest.raises(ZeroDivisionError):
            await load(directory, lambda: 1 / 0)
        assert await _problem(adapters, one, "a") == "", "it is as it was"
        await load(directory, lambda: _change_a_weight(directory))
        assert "changed while it was loaded" in await _problem(adapters, one, "a")
        (directory / WEIGHTS).unlink()
        await load(directory)
        assert WEIGHTS in await _problem(adapters, one, "a")
        await load(directory.with_name("nowhere"))
        assert "not in a local directory" in await _problem(adapters, one, "a")

    asyncio.run(work())
