"""LoRA adapters by their content: what their digest is of, what the model computes with one, whom cartridges go to."""

from __future__ import annotations

import asyncio
import json
import shutil
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapters import write_adapter
from blocks import quietly
from safetensors.torch import load_file, save_file
from wards import MODEL, prefill

from lmcache_cartridge.artifact.weights import CONFIG, WEIGHTS, adapter_digest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import UnsupportedModel
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.train.trainer import wrap

with quietly():
    from vllm.lora.request import LoRARequest

    from lmcache_cartridge.serve.adapters import Adapters, check_made_with

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


def _write_again(directory: Path) -> None:
    save_file(load_file(directory / WEIGHTS), directory / WEIGHTS, metadata={"format": "np"})


def _configured(**fields: Any) -> Callable[[Path], None]:
    return partial(_configure, **fields)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (_change_a_weight, True), (_configured(lora_alpha=33), True), (_configured(use_rslora=True), True),
        (_configured(alpha_pattern={"q_proj": 4}), True), (_configured(target_modules=["q_proj"]), True),
        (_configured(target_modules=["o_proj", "v_proj", "k_proj", "q_proj"], lora_dropout=0.5, task_type="X"), False),
        (_write_again, False),
    ],
)  # fmt: skip
def test_all_that_an_adapter_computes_with_is_in_its_digest_and_not_how_it_was_written(directory, change, is_other):
    before = adapter_digest(directory)
    change(directory)
    assert (adapter_digest(Path(shutil.move(directory, directory.with_name("moved")))) != before) is is_other


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


@pytest.mark.parametrize("change", [_rename_weights, lambda directory: _configure(directory, r=4)])
def test_an_adapter_of_another_model_is_refused(directory, change):
    change(directory)
    with pytest.raises(UnsupportedModel, match="not of this model"):
        CausalModel(MODEL, lora=directory)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize(
    "header", [b"[1]", b'{"x": 1}', b"\xff\xfe", b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 99]}}']
)
def test_what_is_no_adapter_is_refused_at_no_more_cost_than_its_size(directory, name, header):
    """A file of ten bytes asked for 64 TiB, and that error nobody caught."""
    (directory / name).write_bytes((1 << 46 if header == b"[1]" else len(header)).to_bytes(8, "little") + header)
    tracemalloc.start()
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        adapter_digest(directory)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 4 << 20
    (directory / name).unlink()
    with pytest.raises(UnsupportedModel, match=f"it has no {name}"):
        adapter_digest(directory)


# What the model computes.


def test_a_cartridge_is_trained_for_the_adapter_and_the_adapter_is_not(written):
    model = CausalModel(MODEL, dtype="float32", lora=written)
    kv = prefill(model, IDS)
    peft = wrap(model, kv[:, :, :16])
    assert torch.equal(prefill(model, IDS), kv)
    trained = [name for name, parameter in peft.named_parameters() if parameter.requires_grad]
    assert {name.partition(".")[0] for name in trained} == {"prompt_encoder"}


def test_commands_make_cartridges_of_an_adapter(written, tmp_path, capsys):
    document = tmp_path / "a.txt"
    document.write_text("Patient Mora: blood AB+, ward 7, allergy latex. " * 8)

    def run(command: str, *options: str) -> Any:
        assert main([*command.split(), *options, "--home", str(tmp_path / "home"), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    model = ["--model", MODEL, "--lora", str(written)]
    run("build --id whole --chunk-size 16 --document", str(document), *model)
    run("build --from whole --id short --compact 2x --accept 0", *model)
    for name in ("whole", "short"):
        shown = run(f"show {name}")
        assert (shown["fingerprint"]["lora"], shown["provenance"]["lora"]) == (adapter_digest(written), "one")
    for command in ("build --from whole --id x --compact 2x --model", "export whole --to peft --output"):
        assert main([*command.split(), MODEL if "build" in command else "out", "--home", str(tmp_path / "home")]) == 1
        assert "lora" in capsys.readouterr().err.lower()


# As vLLM has them loaded.


def test_an_adapter_whose_files_were_not_read_as_vllm_read_them_is_of_no_cartridge(directory):
    """What `served/test_lora.py` cannot time."""
    served: dict[str, LoRARequest] = {}
    adapters = Adapters(served)

    async def work() -> None:
        async def problem() -> str:
            return (await adapters.of("a")).problem

        async def load(path: Path, meanwhile: Callable[[], Any] = lambda: None) -> str:
            request = LoRARequest("a", 1, str(path), load_inplace=True)

            async def loading(_: LoRARequest) -> bool:
                assert not served or "is being loaded" in await problem()
                meanwhile()
                return True

            assert await adapters.load(loading, request)
            served["a"] = request
            return await problem()

        assert await load(directory) == ""
        with pytest.raises(ZeroDivisionError):
            await load(directory, lambda: 1 / 0)
        assert await problem() == "", "it is as it was"
        assert "changed while it was loaded" in await load(directory, lambda: _change_a_weight(directory))
        (directory / WEIGHTS).unlink()
        assert WEIGHTS in await load(directory)
        assert "not in a local directory" in await load(directory.with_name("nowhere"))
        check_made_with(SimpleNamespace(tag=None), await adapters.of("a"))  # token ids go with any

    asyncio.run(work())
