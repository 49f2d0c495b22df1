"""A cartridge that is built, pushed to S3 and registered from there, as the README has it, answers as its document does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from processor import MAY_TURN
from wards import MODEL, Answer, Asker, save

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import SHEETS_DIR, load_sheet
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import from_mapping

ARGS = ["--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
CHUNK, WHOLE = 256, 1024
"""LMCache's default, and how much of a sheet is whole chunks of it."""
SHEETS = {"plain": "ward-a", "int8": "ward-b", "trained": "ward-c"}


class _Served(NamedTuple):
    asker: Asker
    model: CausalModel

    def wrong(self, name: str) -> list[tuple[str, Answer, str]]:
        """Return the questions of a sheet that its cartridge answers otherwise than the document in the prompt does."""
        sheet, found = load_sheet(SHEETS[name]), []
        ids = self.model.encode(sheet.text, special=True)[: WHOLE if name == "trained" else None]
        for number, question in enumerate(sheet.questions):
            computed = [*ids, *self.model.encode(" " + question.text, special=False)]
            expected = self.asker.complete(computed, False, tokens=4, cache_salt=f"c{number}")
            assert expected.cached_tokens == 0
            answer = self.asker.complete(question.text, name, tokens=4, cache_salt=f"a{number}")
            assert answer.cached_tokens == WHOLE
            if answer.text != expected.text:
                found.append((question.text, answer, expected.text))
        return found

    def exact(self, name: str) -> int:
        """Return how many questions of a sheet are answered right, by the document at the head of a plain prompt."""
        sheet = load_sheet(SHEETS[name])
        self.asker.complete(sheet.questions[0].text, name, cache_salt="warm")  # a plain prompt waits for nothing
        answers = [self.asker.complete(f"{sheet.text} {q.text}", tokens=8, cache_salt=q.text) for q in sheet.questions]
        assert {answer.cached_tokens for answer in answers} == {WHOLE}
        return sum(a.text.strip() == q.answer for a, q in zip(answers, sheet.questions, strict=True))


@pytest.fixture(scope="module")
def served(moto_server, tmp_path_factory):
    author, home = (str(tmp_path_factory.mktemp(name)) for name in ("author", "home"))
    model = CausalModel(MODEL)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            **moto_server.environment, "AWS_ENDPOINT_URL_S3": moto_server.endpoint, "AWS_DEFAULT_REGION": "us-east-1",
            "LMCACHE_CARTRIDGE_CACHE": str(tmp_path_factory.mktemp("cache")),
        }.items():  # fmt: skip
            environment.setenv(name, value)
        moto_server.client.create_bucket(Bucket="readme")
        for name, sheet in SHEETS.items():
            document, where = SHEETS_DIR / f"{sheet}.txt", f"s3://readme/{name}"
            if name == "trained":
                ids = model.encode(load_sheet(sheet).text, special=True)[:WHOLE]
                save(model, Path(author) / name, ids, name=name, kind="trained")
                _run("import", str(Path(author) / name), "--home", author)
            else:
                _run(
                    "build", "--model", MODEL, "--document", str(document), "--id", name, "--payload", name,
                    "--home", author,
                )  # fmt: skip
            _run("publish", name, where, "--home", author)
            _run("import", where, "--home", home)
        # Memory for one of them, so that each pushes out the one before, whose copy is then on disk.
        settings = from_mapping({"home": home, "cpu_bytes": (WHOLE + CHUNK) * model.fingerprint.token_bytes})
        launch = plan(MODEL, settings, vllm_args=ARGS, mode="multiprocess")
        with ServerProcess(launch, Path(home) / "log", environment=SMALL) as process, Asker(process.url) as asker:
            yield _Served(asker, model)


def _run(*arguments: str) -> None:
    assert main(list(arguments)) == 0


@pytest.mark.parametrize("name", SHEETS)
def test_every_question_is_answered_as_by_the_document(served, name):
    assert len(found := served.wrong(name)) <= MAY_TURN, found


def test_a_plain_prompt_with_the_document_is_answered_right(served):
    assert served.exact("plain") == len(load_sheet(SHEETS["plain"]).questions)
