"""Plain vLLM with nothing but `kv_connector_extra_config`: no registry, no YAML, and every answer counted."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import foreign
import numpy as np
import pytest
import torch
from matrix import Way, stock
from serving import question_ids, stored_kv
from wards import MODEL, Asker

from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.recall import SHEETS_DIR, load_sheet
from lmcache_cartridge.make import prefill
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.processes import ServerProcess

PUBLISHED = "vllm.distributed.kv_transfer.kv_connector.v1.cartridge_connector"
"""What users write, word for word, for the connector as it was published; vLLM has no such module."""
QUESTIONS = 4
TRACE = tempfile.gettempdir() + "/lmcache-cartridge-forms-ran"


class Runs:
    """An object that leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch " + TRACE,)


class Served(NamedTuple):
    client: Asker
    model: CausalModel
    place: Path
    files: Path

    def right(self, sheet: str, injected: int, **fields: object) -> int:
        """Return how many questions on a sheet are answered right, each with so many positions injected."""
        count = 0
        for question in load_sheet(sheet).questions[:QUESTIONS]:
            own = question_ids(self.model, question.text)
            reply = self.client.ask(own, **fields)
            assert reply.cached_tokens == injected
            count += reply.text.strip() == question.answer
        return count


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    place, home, files = (tmp_path_factory.mktemp(name) for name in ("artefacts", "home", "files"))
    model = CausalModel(MODEL)
    prefill.build(model, SHEETS_DIR / "ward-a.txt", place / "ward-a", cartridge_id="ward-a", version=1)
    ids = model.encode(load_sheet("ward-b").text, special=True)
    with ArtifactWriter(
        place / "prefix", cartridge_id="prefix", version=1, kind="tokens", fingerprint=model.fingerprint,
        token_ids=np.array(ids),
    ) as writer:  # fmt: skip
        writer.commit(model.provenance("test"))
    keys, values = foreign.htd(stored_kv(place / "ward-a")[:, :, :1024])
    sheet = model.encode(load_sheet("ward-a").text, special=True)
    torch.save({"token_ids": sheet, "kv_cache": list(zip(keys, values, strict=True))}, files / "kv.pt")
    torch.save({"token_ids": ids}, files / "ids.pt")
    torch.save({"token_ids": ids, "kv_cache": Runs()}, files / "runs.pt")
    extra = {
        "cartridges": {"first": "ward-a", "prefix": str(place / "prefix")},
        "router": {"type": "label", "field": "cartridge_id"},
        "cartridge.roots": [str(files)], "cartridge.ready_timeout_s": 300,
    }  # fmt: skip
    transfer = {"kv_connector": "CartridgeConnector", "kv_connector_module_path": PUBLISHED, "kv_role": "kv_both"}
    way = Way(None, {"LMCACHE_CARTRIDGE_CACHE": str(home / "cache")}, extra, transfer)
    launch = stock(home, home, way, options=("--enable-prompt-tokens-details",))
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as here:
            here.chdir(place)
            server = stack.enter_context(ServerProcess(launch, place / "log", timeout_s=900))
        client = stack.enter_context(Asker(server.url))
        yield Served(client, model, place, files)


def test_tokens_behind_kv_are_computed_and_so_is_all_that_stands_behind_tokens(served):
    """A sheet is found wherever in a chain it stands, and the header tells how it came there."""
    for chain, injected in ((["first", "prefix"], 1024), (["prefix", "first"], 0)):
        for sheet in ("ward-a", "ward-b"):
            assert served.right(sheet, injected, cartridges=chain) >= QUESTIONS - 1
    own = question_ids(served.model, load_sheet("ward-a").questions[0].text)
    reply = served.client.post(prompt=own, max_tokens=1, cartridges=["first", "prefix", "first"])
    used = [entry.split(";") for entry in reply.headers["x-cartridges"].split(", ")]
    assert [entry[2:] for entry in used] == [["injected=1024"], ["injected=0", "served=tokens"],
                                             ["injected=0", "served=document"]]  # fmt: skip


def test_named_and_labelled_cartridges_answer_and_nothing_else_is_had(served):
    assert served.right("ward-a", 1024, cartridges=["first"]) == QUESTIONS
    assert served.right("ward-a", 1024, cartridge_id="first") == QUESTIONS
    assert served.right("ward-b", 0, cartridge_id="prefix") == QUESTIONS
    assert served.right("ward-a", 1024, cartridges=[str(served.place / "ward-a")]) == QUESTIONS
    assert served.right("ward-a", 0) < QUESTIONS / 2, "without a cartridge it does not know"
    for wrong, status in (({"cartridge_id": "third"}, 404), ({"cartridges": [str(served.place)]}, 404)):
        assert served.client.post(prompt="x", **wrong).status_code == status


def test_files_by_path_are_imported_and_answer_and_hostile_ones_are_refused(served):
    kv, ids = str(served.files / "kv.pt"), str(served.files / "ids.pt")
    assert served.right("ward-a", 1024, cartridges=[kv]) >= QUESTIONS - 1, "their KV lacks the sheet's last words"
    assert served.right("ward-b", 0, cartridges=[ids]) == QUESTIONS
    for sheet in ("ward-a", "ward-b"):
        assert served.right(sheet, 1024, cartridges=[kv, ids]) >= QUESTIONS - 1
    refused = {
        str(served.files / "runs.pt"): (422, "which may run anything"),
        str(served.files / "no.pt"): (404, "under the setting `roots`"),
        str(served.place / "outside.pt"): (404, "under the setting `roots`"),
    }
    for path, (status, why) in refused.items():
        reply = served.client.post(prompt="x", cartridges=[path])
        assert (reply.status_code, why in reply.text) == (status, True), reply.text
    assert not Path(TRACE).exists(), "something ran"
    assert served.right("ward-a", 1024, cartridges=["first"]) == QUESTIONS, "the server is alive"
