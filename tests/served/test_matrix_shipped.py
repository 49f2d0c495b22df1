"""The matrix's cells of the shipped model, in one file, so that their cartridges are made once. It knows what stands in a sheet, so what each kind of cartridge answers is counted."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import foreign
import numpy as np
import pytest
import torch
from cells import CELLS
from lessons import write_questions
from matrix import CellTests, Served, serve
from processor import MAY_TURN
from recall.ward import Fact, ask, encode
from s3 import MotoServer
from serving import difference, stored_kv
from templates import WARD
from wards import MODEL, Answer, Ward, content, patients, prefill, register, sure, write_ward

from lmcache_cartridge.artifact.writing import ArtifactWriter
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.progress import silent
from lmcache_cartridge.memory.rope import shift
from lmcache_cartridge.settings import Settings, from_mapping
from lmcache_cartridge.sources.published import Library
from lmcache_cartridge.sources.s3 import S3Source
from lmcache_cartridge.sources.transfer import push

BUCKET = "matrix"
FEW = 13
"""Positions of the smallest cartridge: CartridgeConnector's own recipe."""


class Kind(NamedTuple):
    """What a request names, and what it gets."""

    names: Sequence[str]
    """A name with a dot is that of a file, which the request names by where it lies."""
    sheets: Sequence[str]
    """Those whose facts it answers."""
    injected: str
    """`all`, `chunks`: all whole chunks, or `none`."""


KINDS = {
    "by prefill": Kind(["a"], "a", "chunks"),
    "in int8": Kind(["b"], "b", "chunks"),
    "trained": Kind(["trained"], "a", "all"),
    "compacted": Kind(["short"], "a", "all"),
    "a file": Kind(["a.pt"], "a", "all"),
    "token ids": Kind(["ids"], "b", "none"),
    "a chain": Kind(["b", "trained"], "ab", "chunks"),
    "the chain turned": Kind(["trained", "b"], "ab", "chunks"),
    "a chain of what was made": Kind(["short", "a.pt"], "a", "all"),
    "a chain with the compacted behind": Kind(["b", "short"], "ab", "chunks"),
}


class Made(NamedTuple):
    """Cartridges in a home, which cells serve from where they say."""

    home: Path
    model: CausalModel
    wards: dict[str, Ward]
    kv: torch.Tensor
    """Of sheet `a`."""
    known: dict[str, dict[str, list[Fact]]]
    """By kind and sheet, what transformers answers right with certainty after the same KV."""


class ShippedCell(NamedTuple):
    """A served cell, and what it was made of."""

    served: Served
    made: Made

    def name(self, name: str) -> Any:
        """Return how a request names a cartridge."""
        if "." not in name:
            return name
        if self.served.cell.source == "s3":
            return {"id": f"s3://{BUCKET}/files/{name}", "source": "s3"}
        return str(self.made.home / "files" / name)

    def ask(self, ids: list[int], *names: str, **fields: Any) -> Answer:
        """Return the reply behind cartridges."""
        return self.served.ask(ids, *map(self.name, names), **fields)

    def right(self, facts: Sequence[Fact], *names: str) -> list[int]:
        """Return how many positions were not computed for each fact that is answered right."""
        replies = [(self.ask(encode(ask(fact, 0)), *names, tokens=2), fact) for fact in facts]
        return [reply.cached_tokens for reply, fact in replies if reply.text.strip() == fact.value]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Sheets `a` and `b` without a patient in common, as cartridges of every kind; `cut` lacks the end of `a`."""
    home, model = tmp_path_factory.mktemp("made"), CausalModel(MODEL)
    settings, files = from_mapping({"home": home}), home / "files"
    files.mkdir()
    wards = {name: write_ward(model, patients(number, 3), f"matrix {name}") for number, name in enumerate("ab")}
    for name, ward in wards.items():
        (home / f"{name}.txt").write_text(ward.document.text)
    (home / "template.jinja").write_text(WARD)
    questions = write_questions(home / "questions.jsonl", wards["a"].document)
    common = ["--model", MODEL, "--home", str(home), "--document"]
    with_questions = ["--questions", str(questions)]
    for command, sheet, name, *options in (
        ("build", "a", "a"), ("build", "b", "b", "--payload", "int8"),
        ("build", "a", "short", "--compact", "4x", "--refine", "0", *with_questions),
        ("build", "b", "chat", "--chat", "system", "--chat-template", str(home / "template.jinja")),
    ):  # fmt: skip
        assert main([command, *common, str(home / f"{sheet}.txt"), "--id", name, *options]) == 0
    kv = prefill(model, wards["a"].ids)
    register(model, settings, wards["a"].ids, name="trained", kind="trained")
    register(model, settings, wards["a"].ids[:1024], name="cut", kind="trained")
    register(model, settings, wards["a"].ids[:FEW], name="few", kind="trained")
    with ArtifactWriter(
        settings.cartridges_dir / "ids", cartridge_id="ids", version=1, kind="tokens", fingerprint=model.fingerprint,
        token_ids=np.array(wards["b"].ids),
    ) as writer:  # fmt: skip
        writer.commit(model.provenance("test"))
    Registry(settings.registry_path).register(settings.cartridges_dir / "ids")
    foreign.hazy(kv, files / "a.pt")
    other, short = prefill(model, wards["b"].ids), stored_kv(settings.cartridges_dir / "short" / "1")
    parts = {"b": other, "ids": other, "short": short}
    known = {}
    for kind, (names, sheets, _) in KINDS.items():
        chain = parts.get(names[0], kv)
        for name in names[1:]:
            chain = torch.cat([chain, shift(parts.get(name, kv), model.fingerprint, chain.shape[2])], dim=2)
        known[kind] = {sheet: sure(model, chain, wards[sheet].facts[:9]) for sheet in sheets}
    return Made(home, model, wards, kv, known)


@contextmanager
def serve_shipped(name: str, made: Made, directory: Path, s3: MotoServer) -> Iterator[ShippedCell]:
    """Serve a cell of the shipped model, its cartridges from where the cell says."""
    cell = CELLS[name]
    given: dict[str, Any] = {"home": directory / "home", "cpu_bytes": 64 << 20, "lookup_timeout_s": 20,
                             "ready_timeout_s": 300, "roots": [made.home / "files"], "buckets": [BUCKET],
                             "s3_endpoint_url": s3.endpoint, "disk_dir": directory / "disk"}  # fmt: skip
    if cell.source == "library":
        given["library"] = str(directory / "library")
    # What a server imports of a file is kept on its disk, and is the same for each that has it from the same place.
    (imported := made.home / "imported").mkdir(exist_ok=True)
    (directory / "disk").mkdir()
    (directory / "disk" / imported.name).symlink_to(imported)
    settings = from_mapping(given)
    _put(made, settings, cell.source, s3)
    documents = {sheet: ward.ids for sheet, ward in made.wards.items()}
    text = made.model.encode(write_ward(made.model, patients(2, 3), "matrix c").document.text, special=False)
    question = encode(ask(made.wards["a"].facts[0], 0))
    options = ["--chat-template", str(made.home / "template.jinja")]
    with serve(cell, directory, MODEL, made.model, settings, documents, text, question, options) as served:
        yield ShippedCell(served, made)


def _put(made: Made, settings: Settings, source: str, s3: MotoServer) -> None:
    """Bring the cartridges to where a cell has them from."""
    rows = Registry(from_mapping({"home": made.home}).registry_path).all()
    if source == "directory":
        for row in rows:
            Registry(settings.registry_path).register(row.local_root())
    elif source == "library":
        Path(settings.library).mkdir()
        with Library(settings) as library:
            for row in rows:
                library.publish(row.local_root())
    else:
        source_of = S3Source(**settings.s3)
        for row in rows:
            where = f"s3://{BUCKET}/{row.id}"
            push(row.local_root(), where, source_of, progress=silent)
            Registry(settings.registry_path).register(row.local_root(), where)
        for path in (made.home / "files").iterdir():
            s3.client.upload_file(str(path), BUCKET, f"files/{path.name}")
        source_of.close()


@pytest.fixture(scope="module", params=[name for name, cell in CELLS.items() if cell.model == "shipped"])
def cell(request, made, moto_server, tmp_path_factory):
    with pytest.MonkeyPatch.context() as here:
        for name, value in moto_server.environment.items():
            here.setenv(name, value)
        if BUCKET not in [bucket["Name"] for bucket in moto_server.client.list_buckets()["Buckets"]]:
            moto_server.client.create_bucket(Bucket=BUCKET)
        with serve_shipped(request.param, made, tmp_path_factory.mktemp("cell"), moto_server) as cell:
            yield cell


@pytest.fixture(scope="module")
def served(cell):
    """What every cell is asked is asked of this."""
    return cell.served


class TestCells(CellTests):
    """What every cell of the shipped model is asked: logprobs of several kinds of cartridge, so not those of one alone."""

    test_a_named_document_is_injected_and_told_from_another = None

    def test_validate_finds_every_answer_as_transformers_and_the_dense_prompt_have_it(self, served):
        """In fp8 a computed document is further from its cartridge than noise: only the canary knows by how much."""
        result = "NOT CHECKED" if served.cell.in_fp8 else "pass"
        rows = served.validate("0", "--cartridges", "a")
        assert [(row["tier"], row["result"]) for row in rows] == [("noise", "pass"), ("0", result)], rows

    def test_validate_asks_what_is_known_to_follow_a_cartridge(self, cell, capsys):
        asked = ["--url", cell.served.client.url, "--home", str(cell.made.home)]
        assert main(["validate", "a", *asked]) == 0, capsys.readouterr()

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_kind_of_cartridge_answers_what_stands_in_its_sheets(self, cell, kind):
        names, _, injected = KINDS[kind]
        lengths = {"short": 256, "ids": 0}
        sizes = [lengths.get(name, len(cell.made.wards["b" if name == "b" else "a"].ids)) for name in names]
        expected = sum(sizes) if injected == "all" else cell.served.whole(sum(sizes))
        for sheet, facts in cell.made.known[kind].items():
            right = cell.right(facts, *names)
            may_turn = max(MAY_TURN, cell.served.cell.in_fp8)
            assert len(right) >= len(facts) - may_turn >= 6, f"{len(right)} of {len(facts)} on sheet {sheet}"
            assert min(right) >= expected

    def test_logprobs_are_those_of_the_document_in_the_prompt(self, cell):
        ward, far = cell.made.wards["a"], []
        for fact in [*ward.facts[:2], *ward.facts[-2:]]:
            own = encode(ask(fact, 0))
            computed = cell.served.computed([*ward.ids, *own])
            for name in ("a", "trained", "a.pt"):
                assert difference(cell.ask(own, name), computed) < cell.served.cell.noise, name
            far.append(difference(cell.ask(own, "b"), computed))
        assert min(far) > 2 * cell.served.cell.noise, "the control: another sheet's"

    def test_what_stands_behind_the_last_whole_chunk_of_a_trained_one_is_known(self, cell):
        ward, made = cell.made.wards["a"], cell.made
        known = sure(made.model, made.kv[:, :, :1024], ward.facts)
        last = [fact for fact in ward.facts if fact not in known]
        assert len(last) >= 1
        assert len(cell.right(last, "trained")) == len(last) > len(cell.right(last, "cut"))

    def test_a_cartridge_of_few_positions_is_injected_whole(self, cell):
        own = encode(ask(cell.made.wards["a"].facts[0], 0))
        expected = cell.made.model.logits_after(cell.made.kv[:, :, :FEW], own)[-1].log_softmax(-1)
        reply = cell.ask(own, "few")
        assert reply.cached_tokens == FEW
        found = {int(token.removeprefix("token_id:")): value for token, value in reply.logprobs[0].items()}
        assert max(abs(value - float(expected[token])) for token, value in found.items()) < cell.served.cell.noise

    def test_a_chat_goes_on_behind_its_document(self, cell):
        right, facts = 0, cell.made.wards["b"].facts[:5]
        for fact in facts:
            reply = cell.served.client.chat(content(fact), "chat", tokens=2)
            assert reply.cached_tokens >= 1024, reply
            right += reply.text.strip() == fact.value
        assert right >= len(facts) - 1

    def test_many_at_once_get_each_its_own_answer(self, cell):
        names = {"a": "a", "b": "b", "trained": "a", "a.pt": "a"}
        asked = [(name, fact) for name, sheet in names.items() for fact in cell.made.wards[sheet].facts[:5]]
        random.Random(0).shuffle(asked)
        with ThreadPoolExecutor(8) as pool:
            right = list(pool.map(lambda pair: len(cell.right([pair[1]], pair[0])), asked))
        assert sum(right) == len(asked)

    def test_it_was_run_as_its_line_says(self, served):
        super().test_it_was_run_as_its_line_says(served)
        if "--speculative-config" in served.cell.options:
            assert served.client.metric("vllm:spec_decode_num_drafts_total") > 0
        if "--data-parallel-size" in served.cell.options:
            finished = [served.client.metric(f'vllm:request_success_total{{engine="{engine}"') for engine in range(2)]
            assert min(finished) > 0, "one of them had nothing to do"
        sizes = set(map(int, re.findall(r"chunks are \d+ tokens of (\d+) bytes", served.log.read_text())))
        if served.cell.in_fp8:
            assert sizes == {served.cell.chunk * served.model.fingerprint.token_bytes // 2}, "a byte for each number"
        assert {served.client.state(name)["canary"] for name in ("a", "b", "short")} == {"passed"}
