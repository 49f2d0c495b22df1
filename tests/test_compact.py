"""Compaction: a quarter of a sheet's positions answers what the sheet does, without training, when its keys are re-rotated."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lessons import MODEL, write_template
from msgspec import structs
from recall.ward import QUESTIONS, Fact, write_document

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.artifact.manifest import Manifest
from lmcache_cartridge.cli.main import main
from lmcache_cartridge.errors import ArtifactError, CartridgeError, ModelMismatch, UnsupportedModel
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.compact import closed, references
from lmcache_cartridge.make.compact.closed import attended, compacted, fit_errors, rerotated
from lmcache_cartridge.make.compact.distill import RATE
from lmcache_cartridge.make.compact.groups import groups
from lmcache_cartridge.make.compact.job import compact, make
from lmcache_cartridge.make.compact.judge import share_kept
from lmcache_cartridge.make.compact.keys import fitted_keys
from lmcache_cartridge.make.compact.references import References, collect
from lmcache_cartridge.make.compact.wanted import Wanted, references_of, repeated
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.payload import read_checked, read_kv
from lmcache_cartridge.make.questions import Question, save
from lmcache_cartridge.make.train.initial import FROZEN, prefilled
from lmcache_cartridge.make.train.packing import Example

torch.set_num_threads(1)

P4, P16, P32 = 128, 32, 16
TRAINED, UNSEEN = (QUESTIONS[0], QUESTIONS[2]), QUESTIONS[1]


class Sheet(NamedTuple):
    """A sheet of some 500 tokens, and what its questions ask of its KV."""

    model: CausalModel
    text: str
    facts: tuple[Fact, ...]
    ids: list[int]
    kv: torch.Tensor
    questions: list[Question]
    asked: References

    def exact(self, kv: torch.Tensor) -> float:
        """Return the share of facts answered right after KV in bfloat16, in a wording that nothing was made with."""
        prompts = [self.model.question_ids(UNSEEN.format(**fact._asdict()), "chat") for fact in self.facts]
        wanted = [self.model.encode(fact.value, special=False) for fact in self.facts]
        found = self.model.answers_after(kv.bfloat16().float(), prompts, 3)
        return sum(got == right for got, right in zip(found, wanted, strict=True)) / len(wanted)


@pytest.fixture(scope="module")
def sheet() -> Sheet:
    return _sheet("compact test", 480)


def _sheet(seed: str, tokens: int) -> Sheet:
    model = CausalModel(MODEL)
    model.model.float()
    document = write_document(random.Random(seed), tokens)
    ids = model.encode(document.text, special=True)
    kv = prefilled(model, ids)
    questions = [Question(text.format(**fact._asdict())) for fact in document.facts for text in TRAINED]
    asked = collect(model, kv, references_of(model, ids, Wanted(P4, questions)))
    return Sheet(model, document.text, document.facts, ids, kv, questions, asked)


@pytest.fixture(scope="module")
def four(sheet: Sheet) -> torch.Tensor:
    """A quarter of the positions, keys as in the document."""
    return compacted(sheet.kv, sheet.asked, P4)


# What is asked.


def test_the_attention_over_the_document_and_the_question_is_the_model_s_own(sheet: Sheet) -> None:
    for number, asked in enumerate(sheet.asked.layers):
        keys, values = sheet.kv[:, number].transpose(1, 2)
        error = (attended(asked, keys, values) - asked.wanted).norm() / asked.wanted.norm()
        assert error < 1e-4


def test_the_document_read_again_asks_for_every_token_once(sheet: Sheet) -> None:
    examples = repeated(sheet.ids)
    assert sheet.ids[1:] == [token for example in examples for token in example.answer]
    found = collect(sheet.model, sheet.kv, examples)
    assert len(found.answers) == len(sheet.ids) - 1 and found.answers.all()


def test_of_too_many_tokens_those_that_predict_answers_are_kept(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = references_of(sheet.model, sheet.ids, Wanted(P4, sheet.questions))
    monkeypatch.setattr(references, "MOST_QUERIES", len(examples) + 7)
    found = collect(sheet.model, sheet.kv, examples)
    assert len(found.answers) == len(examples) + 7
    assert int(found.answers.sum()) == len(examples)
    assert {plane.shape[2] for layer in found.layers for plane in layer} == {len(examples) + 7}


def test_attention_that_is_no_plain_softmax_is_refused(sheet: Sheet) -> None:
    with pytest.raises(UnsupportedModel, match="sliding_window"), references.listening(sheet.model, lambda *_: None):
        attention = references.AttentionInterface()[references.ATTENTION]
        attention(None, *[torch.zeros(1)] * 3, torch.zeros(1, 1, 1, 1), sliding_window=8)


# Keys and values in closed form.


def test_a_quarter_answers_within_a_point_without_a_gradient_step(sheet: Sheet, four: torch.Tensor) -> None:
    document = sheet.exact(sheet.kv)
    assert document > 0.97
    assert sheet.exact(rerotated(sheet.model, four, len(sheet.ids))) >= document - 0.01


def test_keys_left_where_they_were_answer_far_worse() -> None:
    """The control: the same KV, its keys nearer to the question than they were by n - p positions, which are 770 here."""
    long = _sheet("compact dev 0", 1024)
    kv = compacted(long.kv, long.asked, 256)
    long = long._replace(facts=long.facts[::3])
    right = long.exact(rerotated(long.model, kv, len(long.ids)))
    assert right >= 0.97
    assert long.exact(kv) <= right - 0.3


def test_values_by_least_squares_beat_the_mean_of_those_they_stand_for(
    sheet: Sheet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = compacted(sheet.kv, sheet.asked, P16)
    monkeypatch.setattr(closed, "_fit", lambda head, keys, values, weights: values)
    averaged = compacted(sheet.kv, sheet.asked, P16)
    errors = [sum(fit_errors(kv, sheet.asked, sheet.asked.answers)) for kv in (fitted, averaged)]
    assert errors[0] < errors[1], errors


def test_fitted_keys_beat_the_mean_of_those_they_stand_for(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = compacted(sheet.kv, sheet.asked, P16)
    monkeypatch.setattr(closed, "fitted_keys", lambda start, *rest: start)
    averaged = compacted(sheet.kv, sheet.asked, P16)
    exact = [sheet.exact(rerotated(sheet.model, kv, len(sheet.ids))) for kv in (fitted, averaged)]
    assert exact[0] >= 0.85 and exact[0] >= exact[1] + 0.3, exact


def test_keys_that_give_the_wanted_shares_are_found() -> None:
    draw = torch.Generator().manual_seed(0)
    right, queries = torch.randn(6, 8, generator=draw), 2 * torch.randn(400, 8, generator=draw)
    own = torch.randn(400, generator=draw)
    shares = torch.cat([queries @ right.T, own[:, None]], dim=1).softmax(1)[:, :-1]
    start = right.clone()
    start[FROZEN:] = 0
    found = fitted_keys(start, queries, own, shares, torch.ones(400), 64)
    assert torch.equal(found[:FROZEN], right[:FROZEN])
    got = torch.cat([queries @ found.T, own[:, None]], dim=1).softmax(1)[:, :-1]
    assert (got - shares).abs().mean() < 0.02


def test_values_that_are_alike_are_one_group() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 4, generator=draw)
    which = torch.randint(5, (60,), generator=draw)
    found = groups(centres[which] + 0.01 * torch.randn(60, 4, generator=draw), torch.ones(60), 5)
    assert len(set(zip(found.tolist(), which.tolist(), strict=True))) == 5
    # Where there is room each is alone; what nobody looks at gives way.
    assert sorted(groups(centres, torch.ones(5), 5).tolist()) == [0, 1, 2, 3, 4]
    weights = torch.tensor([1.0, 1.0, 1.0, 1e-6, 1e-6])
    assert len(set(groups(centres, weights, 3)[:3].tolist())) == 3


def test_a_head_looks_for_what_the_heads_before_it_lack(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[torch.Tensor] = []
    monkeypatch.setattr(closed, "_fit", lambda head, keys, values, each: weights.append(each) or values)
    compacted(sheet.kv, sheet.asked, P16)
    answers = sheet.asked.answers.repeat(2)
    first, second = (weights[2 + h][answers] for h in range(2))  # of the second layer
    assert (first == 1).all() and second.min() >= closed.FLOOR and second.mean() < 0.8


def test_the_first_key_stays(sheet: Sheet, four: torch.Tensor) -> None:
    assert torch.equal(four[0, :, 0], sheet.kv[0, :, 0])


def test_values_solved_block_by_block_are_as_good(
    sheet: Sheet, four: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closed, "BLOCK_POSITIONS", 48)
    monkeypatch.setattr(closed, "BLOCK_QUERIES", 100)
    blocks = compacted(sheet.kv, sheet.asked, P4)
    assert torch.allclose(blocks[0, :, 0], four[0, :, 0])
    assert sheet.exact(rerotated(sheet.model, blocks, len(sheet.ids))) >= 0.97


# All of it.


def test_the_document_alone_is_enough_for_a_quarter(sheet: Sheet) -> None:
    made = compact(sheet.model, sheet.kv, sheet.ids, Wanted(P4))
    assert made.about.queries == "repeat"
    assert sheet.exact(made.kv) >= 0.9


def test_refining_answers_more_and_distilling_no_less(sheet: Sheet) -> None:
    """At 32x, where what is fitted in closed form answers too little."""
    said: list[str] = []
    plain, refined, both = (
        compact(sheet.model, sheet.kv, sheet.ids, Wanted(P32, sheet.questions, None, *steps, 0.0), say=said.append)
        for steps in ((0, 0), (40, 0), (40, 40))
    )
    exact = [sheet.exact(made.kv) for made in (plain, refined, both)]
    assert exact[0] >= 0.5 and exact[1] >= exact[0] + 0.15, exact
    assert exact[2] >= exact[1] - 0.01, exact
    assert [made.about.refine for made in (plain, refined, both)] == [0, 40, 40]
    assert [line.partition(":")[0] for line in said[-6:-1]] == [
        "reference queries", "keys and values", "refine, 40 steps a layer", "distill, 40 steps",
        "comparison with the document",
    ]  # fmt: skip
    kept = [made.about.kept for made in (plain, refined, both)]
    assert all(abs(share - right) < 0.1 for share, right in zip(kept, exact, strict=True)), (kept, exact)
    assert 0.1 < max(plain.about.fit_error) < 1 and min(plain.about.fit_error) >= 0


def test_what_keeps_the_document_whole_keeps_all_and_what_keeps_nothing_keeps_none(sheet: Sheet) -> None:
    examples = references_of(sheet.model, sheet.ids, Wanted(P4, sheet.questions))
    for kv, share in ((sheet.kv, 1.0), (sheet.kv[:, :, :1], 0.0)):
        assert share_kept(sheet.model, sheet.kv, kv, examples) == share
    # A question whose answer the document does not change says nothing.
    alone = [Example([5], [6], 0)]
    assert share_kept(sheet.model, sheet.kv[:, :, :1], sheet.kv[:, :, :1], alone) is None


def test_what_keeps_too_little_is_not_registered_unless_it_is_accepted(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ("--document", str(home.directory / "sheet.txt"), "--chunk-size", "16")
    argv = ("build", *document, "--id", "s", "--compact", "32x", "--template", str(home.directory / "template.json"))
    assert main([*argv, "--model", MODEL, "--home", str(home.directory)]) == 1
    said = capsys.readouterr().err
    assert "nothing is registered: it keeps " in said and "--accept 0." in said
    assert not (home.directory / "cartridges" / "s").exists()
    assert main(["list", "--home", str(home.directory), "--format", "json"]) == 0
    assert '"s' not in capsys.readouterr().out
    shown = home.run(capsys, *argv, "--accept", "0.1")
    assert 0.1 <= shown["kept"] < 0.8
    assert home.read("s")[0].provenance.compaction.kept == shown["kept"]


def test_a_model_in_its_own_dtype_refines_too(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    document = ("--document", str(home.directory / "sheet.txt"), "--chunk-size", "16", "--accept", "0")
    template = ("--template", str(home.directory / "template.json"))
    home.run(capsys, "build", *document, "--id", "s", "--compact", "16x", "--refine", "1", *template)
    assert home.read("s")[0].provenance.compaction.refine == 1


@pytest.mark.parametrize("positions", [1, 10_000])
def test_a_length_that_is_none_is_refused(sheet: Sheet, positions: int) -> None:
    with pytest.raises(CartridgeError, match="fewer"):
        compact(sheet.model, sheet.kv, sheet.ids, Wanted(positions))


# The command line.


class Home(NamedTuple):
    """A home directory with the sheet."""

    directory: Path

    def run(self, capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
        assert main([*argv, "--model", MODEL, "--home", str(self.directory), "--format", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    def read(self, name: str) -> tuple[Manifest, torch.Tensor]:
        root = Path(Registry(self.directory / "registry.sqlite").find(name).location)
        manifest = reading.load_manifest(root)
        return manifest, read_kv(manifest, root).float()


@pytest.fixture
def home(sheet: Sheet, tmp_path: Path) -> Home:
    (tmp_path / "sheet.txt").write_text(sheet.text)
    write_template(tmp_path / "template.json")
    return Home(tmp_path)


def test_build_compact_and_compact_of_what_was_built_are_the_same_but_for_rounding(
    sheet: Sheet, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ("--document", str(home.directory / "sheet.txt"), "--chunk-size", "64")
    save(sheet.questions, home.directory / "questions.jsonl")
    template = ("--template", str(home.directory / "template.json"))
    how = ("--questions", str(home.directory / "questions.jsonl"))
    home.run(capsys, "build", *document, "--id", "whole")
    shown = home.run(capsys, "build", *document, "--id", "at-once", "--compact", "4x", *template)
    assert shown["positions"] == P4 and len(shown["fit_error"]) == len(sheet.asked.layers)
    home.run(capsys, "compact", "whole", "--id", "later", "--positions", str(P4), *how)
    home.run(capsys, "compact", "whole", "--id", "small", "--compact", "4x", "--payload", "int8", *how)
    for name, tool in (("at-once", "build"), ("later", "compact"), ("small", "compact")):
        manifest, kv = home.read(name)
        about = manifest.provenance.compaction
        assert manifest.kind == "trained" and manifest.document is not None and manifest.canary is not None
        assert manifest.provenance.tool.endswith(f" {tool}") and about is not None and about.queries == "questions"
        assert manifest.document.count == len(sheet.ids)
        assert sheet.exact(kv) >= 0.97, name
    assert home.read("small")[0].payload_bytes < 0.7 * home.read("later")[0].payload_bytes
    assert home.read("later")[0].provenance.origin is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--refine", "3"), "say how short"),
        (("--accept", "0.5"), "say how short"),
        (("--compact", "4x", "--accept", "2"), "from 0 to 1"),
        (("--compact", "4x", "--refine", "-1"), "at least 0"),
        (("--compact", "4x", "--canary", "x"), "--canary"),
        (("--positions", "2048"), "give fewer"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_anything_is_written(
    home: Home, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    command = ("build", "--model", MODEL, "--document", str(home.directory / "sheet.txt"), "--id", "x", *options)
    assert main([*command, "--home", str(home.directory)]) == 1
    assert reason in capsys.readouterr().err
    assert not (home.directory / "cartridges" / "x").exists()


def test_training_starts_from_a_compaction_for_its_questions(
    sheet: Sheet, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("train", "--document", str(home.directory / "sheet.txt"), "--chunk-size", "32", "--positions", str(P16),
              "--template", str(home.directory / "template.json"), "--steps", "1", "--rate", "1e-6", "--accept", "0",
              "--answer-tokens", "4")  # fmt: skip
    ran = {init: home.run(capsys, *common, "--id", init, "--init", init) for init in ("compact", "sci")}
    assert ran["compact"]["init"] == "compact" and ran["compact"]["best_step"] in (0, 1)
    right = {init: sheet.exact(home.read(init)[1]) for init in ran}
    assert right["compact"] >= right["sci"] + 0.3, right
    assert home.read("compact")[0].provenance.training.rate == 1e-6


def test_that_start_is_refined_and_trained_at_a_rate_of_its_own(
    sheet: Sheet, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 32x, where what is fitted in closed form answers too little."""
    common = ("train", "--document", str(home.directory / "sheet.txt"), "--chunk-size", "16", "--positions", str(P32),
              "--template", str(home.directory / "template.json"), "--init", "compact", "--accept", "0",
              "--answer-tokens", "4", "--patience", "0", "--check-every", "20", "--schedule", "cosine")  # fmt: skip
    closed = make(sheet.model, sheet.kv, sheet.ids, Wanted(P32, sheet.questions)).kv
    home.run(capsys, *common, "--id", "start", "--steps", "1", "--rate", "1e-6")
    home.run(capsys, *common, "--id", "trained", "--steps", "40")
    rate = home.read("trained")[0].provenance.training.rate
    assert rate == pytest.approx(RATE * float(closed[0].std()), rel=0.2)
    right = [sheet.exact(kv) for kv in (closed, home.read("start")[1], home.read("trained")[1])]
    assert right[1] >= right[0] + 0.1 and right[2] >= right[1], right


def test_kv_of_another_model_or_of_a_corrupt_cartridge_is_not_read(
    sheet: Sheet, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.run(capsys, "build", "--document", str(home.directory / "sheet.txt"), "--chunk-size", "64", "--id", "whole")
    root = Path(Registry(home.directory / "registry.sqlite").find("whole").location)
    manifest, kv = home.read("whole")
    assert torch.equal(read_checked(manifest, root, sheet.model).float(), kv), "the control"
    other = structs.replace(manifest, fingerprint=structs.replace(manifest.fingerprint, layers=4))
    with pytest.raises(ModelMismatch, match="whole@1 is not of .*layers: 4, not 3"):
        read_checked(other, root, sheet.model)
    payload = root / manifest.payload.file
    stored = bytearray(payload.read_bytes())
    stored[-9] ^= 1
    payload.chmod(0o644)
    payload.write_bytes(stored)
    with pytest.raises(ArtifactError):
        read_checked(manifest, root, sheet.model)


def test_a_compacted_cartridge_is_not_compacted_again(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.run(capsys, "build", "--document", str(home.directory / "sheet.txt"), "--id", "s", "--chunk-size", "64",
             "--compact", "4x")  # fmt: skip
    command = ("compact", "s", "--model", MODEL, "--id", "t", "--compact", "8x", "--home", str(home.directory))
    assert main(command) == 1
    assert "only a prefill cartridge" in capsys.readouterr().err
