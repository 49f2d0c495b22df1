"""A cartridge of KV that a server computed: what it sends is what is stored, and another model's is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.recall import MODEL_DIR, SHEETS_DIR
from lmcache_cartridge.engine.contract import CAPTURE
from lmcache_cartridge.errors import CanaryFailed, CartridgeError, SourceError
from lmcache_cartridge.make import capture
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import pack, read_kv

TOKENS = 256


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(str(MODEL_DIR))


@pytest.fixture(scope="module")
def ids(model: CausalModel) -> list[int]:
    found = model.encode((SHEETS_DIR / "ward-a.txt").read_text(), special=True)[:600]
    assert len(found) % TOKENS and len(found) > 2 * TOKENS
    return found


class FakeServer:
    """A server that computes with transformers, whose KV `damage` changes, on `ranks` ranks of as many heads each."""

    url, model = "http://fake", "m"

    def __init__(
        self, model: CausalModel, damage: Callable[[torch.Tensor], Any] = lambda kv: kv, copies: int = 1
    ) -> None:
        self._model, self._damage, self._copies, self.cached = model, damage, copies, 0
        self._kv: Any = None
        self.asked: dict[str, Any] = {}
        self.fingerprint = model.fingerprint

    def post(self, path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        if path == "/v1/cartridges/capture":
            return read({"chunk_tokens": TOKENS, "fingerprint": msgspec.to_builtins(self.fingerprint)})
        assert path == "/v1/completions"
        self.asked = body
        return read({"usage": {"prompt_tokens_details": {"cached_tokens": self.cached}}})

    def tokenize(self, *, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt is False
        return self._model.encode(messages[0]["content"], special=True)

    def content(self, path: str, body: dict[str, Any]) -> bytes:
        assert (body["name"],) * 2 == (self.asked["cache_salt"], self.asked["kv_transfer_params"][CAPTURE])
        assert body["token_ids"] == self.asked["prompt"][:-1] and len(body["token_ids"]) % TOKENS == 0
        first = body["chunk"] * TOKENS
        if self._kv is None:
            self._kv = torch.cat(list(self._model.prefill(body["token_ids"], TOKENS)), dim=2)
        kv = self._damage(self._kv[:, :, first : first + TOKENS])
        raw = bytes(pack(kv, self._model.fingerprint))
        heads = [raw[i : i + len(raw) // 2] for i in (0, len(raw) // 2)]
        return b"".join(head for head in heads for _ in range(self._copies))


@pytest.mark.parametrize("copies", [1, 2])
def test_what_the_server_sends_is_what_is_stored_of_each_token(
    model: CausalModel, ids: list[int], tmp_path: Path, copies: int
) -> None:
    """Of four ranks two have the same head each."""
    server: Any = FakeServer(model, copies=copies)
    manifest = capture.build(model, server, ids, tmp_path / "a", cartridge_id="a", version=1, document="x.json")
    assert (manifest.kind, manifest.positions, manifest.payload.chunk_tokens) == ("prefill", len(ids), TOKENS)
    assert manifest.canary is not None and manifest.provenance.canary.top1_equal
    assert "build --url" in manifest.provenance.tool
    assert reading.load_token_ids(manifest, tmp_path / "a").tolist() == ids
    stored = read_kv(manifest, tmp_path / "a")
    whole = [*ids, *[ids[-1]] * (-len(ids) % TOKENS)]
    assert torch.equal(stored, torch.cat(list(model.prefill(whole, TOKENS)), dim=2)[:, :, : len(ids)])
    assert stored.shape[2] == len(ids), "what fills the last chunk up is not stored"


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda kv: kv.flip(3), SourceError), (lambda kv: kv.flip(0), SourceError), (torch.zeros_like, SourceError),
        (lambda kv: kv.roll(1, 2), SourceError), (lambda kv: kv[:, :, :100], SourceError),
        (lambda kv: torch.cat([kv[:, :1], kv[:, 1:].flip(3)], dim=1), CanaryFailed),
    ],
    ids=["heads", "keys for values", "nothing", "a token late", "too little", "heads of later layers"],
)  # fmt: skip
def test_kv_of_another_model_is_refused_and_nothing_left(
    model: CausalModel, ids: list[int], tmp_path: Path, damage: Any, error: type[CartridgeError]
) -> None:
    server: Any = FakeServer(model, damage)
    with pytest.raises(error):
        capture.build(model, server, ids, tmp_path / "a", cartridge_id="a", version=1)
    assert not (tmp_path / "a").exists()


def test_a_server_of_other_weights_is_refused_by_its_fingerprint_however_like_its_kv(
    model: CausalModel, ids: list[int], tmp_path: Path
) -> None:
    """Eight bits change values by less than the comparison of KV sees."""
    server: Any = FakeServer(model)
    other = {"weights_digest": "00" * 32, "quantisation": "compressed-tensors int-quantized"}
    server.fingerprint = msgspec.structs.replace(model.fingerprint, **other)
    with pytest.raises(
        SourceError, match="another model than model: weights_digest.*; quantisation: none, not compressed"
    ):
        capture.build(model, server, ids, tmp_path / "a", cartridge_id="a", version=1)


def test_without_the_weights_the_fingerprints_decide_and_there_is_no_canary(
    model: CausalModel, ids: list[int], tmp_path: Path
) -> None:
    server: Any = FakeServer(model)
    light, root = CausalModel(str(MODEL_DIR), weights=False), tmp_path / "a"
    made = capture.build(light, server, ids, root, cartridge_id="a", version=1, compare=False)
    assert (made.canary, made.provenance.canary) == (None, None)
    assert torch.equal(read_kv(made, root), read_kv(*_compared(model, server, ids, tmp_path / "b")))
    server.fingerprint = msgspec.structs.replace(model.fingerprint, weights_digest="00" * 32)
    with pytest.raises(SourceError, match="another model than model: weights_digest"):
        capture.build(light, server, ids, tmp_path / "c", cartridge_id="c", version=1, compare=False)
    assert not (tmp_path / "c").exists()


def _compared(model: CausalModel, server: Any, ids: list[int], root: Path) -> tuple[Manifest, Path]:
    return capture.build(model, server, ids, root, cartridge_id=root.name, version=1), root


def test_a_server_that_found_some_of_the_text_is_refused(model: CausalModel, ids: list[int], tmp_path: Path) -> None:
    server: Any = FakeServer(model)
    server.cached = 128
    with pytest.raises(SourceError, match="only from token 128 on"):
        capture.build(model, server, ids, tmp_path / "a", cartridge_id="a", version=1)


def test_a_conversation_is_rendered_by_the_server(model: CausalModel) -> None:
    server: Any = FakeServer(model)
    assert capture.conversation_ids(server, [{"role": "user", "content": "x"}]) == model.encode("x", special=True)
