"""The servers of `cells`, and what every one of them is asked. Those of the shipped model are asked more: `test_matrix_shipped`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from cells import CELLS, Cell
from commands import Cli
from families import FAMILIES, make_model
from serving import SERVER_ARGS, difference, serving
from waiting import until
from wards import Answer, Asker

from lmcache_cartridge.cli.recall import MODEL_DIR
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.make.write import write_kv
from lmcache_cartridge.serve.launch import Launch, server_command
from lmcache_cartridge.serve.processes import SMALL, ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

PARALLEL = SMALL | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
"""For several workers, and with the routes of development: vLLM can be told to forget its blocks."""
TIERS = "0,0.5,1b,3cross,10,11"
"""Of `validate`: ten answers, transformers' own, longer ones, of another's document, after chains, by identity tokens."""

YAML = (Path(__file__).parents[2] / "configs" / "lmcache-stock-connector.yaml").read_text()
EXTRA_CONFIG = yaml.safe_load(YAML)["extra_config"]
REST = {name: value for name, value in yaml.safe_load(YAML).items() if name != "extra_config"}
"""What the shipped YAML says, apart from our plugin's settings."""
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}


class Way(NamedTuple):
    """How somebody starts vLLM with its own connector's name, without `serve`."""

    yaml: str | None = YAML
    environment: dict[str, str] = {}
    extra: dict[str, object] = {}
    """In `kv_connector_extra_config`."""
    transfer: dict[str, str] | None = TRANSFER


STARTS = {
    "yaml": Way(),
    "variables": Way(
        None,
        {f"LMCACHE_{name.upper()}": json.dumps(value).strip('"') for name, value in REST.items()}
        | {"LMCACHE_EXTRA_CONFIG": json.dumps(EXTRA_CONFIG), "LMCACHE_STORAGE_PLUGINS": "cartridge"},
    ),
    "connector": Way(
        None, {}, {f"lmcache.{name}": value for name, value in {**REST, "extra_config": EXTRA_CONFIG}.items()}
    ),
}


def stock(home: Path, directory: Path, way: Way, model: str = str(MODEL_DIR), options: tuple[str, ...] = ()) -> Launch:
    """Return how somebody starts vLLM over a home in a way, with files for it in a directory."""
    path = directory / "lmcache.yaml"
    command = server_command(model)
    environment = {"LMCACHE_CARTRIDGE_HOME": str(home), **way.environment}
    command += [*SERVER_ARGS, *options]
    if way.transfer:
        command += ["--kv-transfer-config", json.dumps(way.transfer | {"kv_connector_extra_config": way.extra})]
    if way.yaml is not None:
        environment["LMCACHE_CONFIG_FILE"] = str(path)
    return Launch(path, way.yaml or "", environment, command, {})


class Served(NamedTuple):
    """A cell's server. Its home has prefill cartridges of at least two documents."""

    cell: Cell
    client: Asker
    path: str
    """Of the model."""
    model: CausalModel
    settings: Settings
    documents: dict[str, list[int]]
    """Token ids, by cartridge."""
    text: list[int]
    """Tokens of which there is no cartridge."""
    question: list[int]
    """Tokens after which the documents go on each in its own way."""
    log: Path

    def whole(self, tokens: int) -> int:
        """Return how many of so many tokens are whole chunks."""
        return tokens // self.cell.chunk * self.cell.chunk

    def ask(self, ids: list[int], *names: str, **fields: Any) -> Answer:
        """Return the reply behind cartridges; by default of a tenant that never asked before."""
        return self.client.ask(ids, *names, return_tokens_as_token_ids=True, **fields)

    def computed(self, ids: list[int]) -> Answer:
        """Return the reply to a prompt of which everything is computed."""
        return self.client.computed(ids, return_tokens_as_token_ids=True)

    def validate(self, tiers: str, *options: str) -> list[dict[str, Any]]:
        """Return the rows of `validate`, having seen that its exit status says the same; it takes its own cartridges away."""
        options = ("--url", self.client.url, "--tier", tiers, "--format", "json", *options)
        ran = Cli(self.settings.home)("validate", *options)
        found = json.loads(ran.out)
        assert ran.status == (0 if found["passed"] else 1)
        left = [row.id for row in Registry(self.settings.registry_path).all()]
        assert not [name for name in left if name.startswith("trial-")], left
        return found["rows"]


@contextmanager
def serve(
    cell: Cell, directory: Path, path: str, model: CausalModel, settings: Settings, documents: dict[str, list[int]],
    text: list[int], question: list[int], more: Sequence[str] = (),
) -> Iterator[Served]:  # fmt: skip
    """Serve a home as a cell says, with files for it in a directory and `more` options of vLLM."""
    log = directory / "log"
    options = [*cell.options, "--block-size", str(cell.block), *more]
    if cell.start != "plan":
        launch = stock(settings.home, directory, STARTS[cell.start], path, (*options, "--enable-prompt-tokens-details"))
        assert "VLLM_PLUGINS" not in os.environ
        with ServerProcess(launch, log, environment=PARALLEL) as server, Asker(server.url, model=path) as client:
            yield Served(cell, client, path, model, settings, documents, text, question, log)
        assert "lmcache-cartridge's connector takes the place of LMCacheConnectorV1" in log.read_text()
        return

    def driven(launch: Launch) -> Launch:
        """Return a start of which LMCache's server moves the blocks."""
        words = ["lmcache_driven" if each == "engine_driven" else each for each in launch.lmcache or ()]
        return launch._replace(lmcache=words) if cell.has_groups else launch

    l1 = 128 << 20 if cell.saves or cell.mode == "multiprocess" else 0
    given: dict[str, Any] = {"mode": cell.mode, "chunk_tokens": cell.chunk, "saves": cell.saves, "l1_bytes": l1}
    given |= {"environment": PARALLEL, "change": driven}
    with serving(settings, log, path, *options, **given) as client:
        yield Served(cell, client, path, model, settings, documents, text, question, log)


@contextmanager
def serve_family(name: str, directory: Path) -> Iterator[Served]:
    """Serve a cell of a random model in float32, with two documents of three chunks and a part of a fourth."""
    cell = CELLS[name]
    config = FAMILIES[cell.model]()
    if cell.has_groups:
        config.sliding_window = cell.chunk
    path = str(make_model(directory / "model", config))
    model = CausalModel(path, max_model_len=1024 if cell.chunk == 64 else 4096)
    settings = from_mapping({"home": directory / "home", "cpu_bytes": 64 << 20, "lookup_timeout_s": 20})
    length, documents = 3 * cell.chunk + 8, {}
    for number, document in enumerate("ab"):
        documents[document] = [5 + (7 * i * (i + number) + 13 * number) % 600 for i in range(length)]
        kv, made = torch.cat(list(model.prefill(documents[document], length)), dim=2), model.provenance("test")
        write_kv(
            model, kv.split(32, dim=2), settings.cartridges_dir / document, lambda _, made=made: made,
            cartridge_id=document, version=1, positions=length, token_ids=documents[document], chunk_tokens=32,
        )  # fmt: skip
        Registry(settings.registry_path).register(settings.cartridges_dir / document)
    text = [5 + (11 * i * i + 3 * i) % 600 for i in range(length)]
    more = ["--dtype", "float32", "--max-model-len", "1024" if cell.chunk == 64 else "4096"]
    with serve(cell, directory, path, model, settings, documents, text, list(range(400, 410)), more) as served:
        yield served


class CellTests:
    """What every cell is asked: a subclass with a fixture `served`."""

    def test_validate_finds_every_answer_as_transformers_and_the_dense_prompt_have_it(self, served):
        rows = served.validate(TIERS, "--model", served.path, "--chunk-size", str(served.cell.chunk))
        refused = {"11": "FAIL"} if served.cell.has_groups else {}
        assert {row["tier"]: row["result"] for row in rows} == dict.fromkeys(
            ("noise", *TIERS.split(",")), "pass"
        ) | refused, rows
        assert not refused or "a trained cartridge needs" in rows[-1]["found"]

    def test_a_named_document_is_injected_and_told_from_another(self, served):
        (one, ids), (other, _), *_ = served.documents.items()
        mine, others, computed = (
            served.ask(served.question, one),
            served.ask(served.question, other),
            served.computed(ids + served.question),
        )
        assert mine.cached_tokens == served.whole(len(ids)) > 0
        assert difference(mine, computed) < served.cell.noise
        assert difference(others, computed) > 0.1 + 2 * served.cell.noise, "nobody could tell the documents apart"

    def test_a_document_at_the_head_of_a_prompt_is_injected_wherever_the_prompt_ends(self, served):
        ids, chunk = next(iter(served.documents.values())), served.cell.chunk
        # By default no prompt waits for chunks that it does not name: the first has them loaded, and is computed.
        until(lambda: served.ask(ids).cached_tokens)
        for length in (chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, len(ids)):
            reply = served.ask(ids[:length])
            # vLLM always computes the last prompt token itself.
            assert reply.cached_tokens == min(served.whole(length), length - 1)
            assert served.cell.in_fp8 or difference(reply, served.computed(ids[:length])) < served.cell.noise

    def test_what_is_computed_behind_a_cartridge_is_saved_for_its_tenant(self, served):
        (name, ids), *_ = served.documents.items()
        behind = [*served.text, *served.question]
        whole, all_of_it = served.whole(len(ids)), served.whole(len(ids + behind))
        computed, salt = served.computed(ids + behind), f"tenant of {name}"
        replies = [served.ask(behind, name, cache_salt=salt)]
        assert replies[0].cached_tokens == whole

        def again() -> int:
            served.client.forget()
            replies.append(served.ask(behind, name, cache_salt=salt))
            return replies[-1].cached_tokens

        if served.cell.saves:
            until(lambda: again() == all_of_it)
        else:
            assert {again() for _ in range(3)} == {whole}
        replies.append(served.ask(behind, name))
        assert replies[-1].cached_tokens == whole, "another tenant's"
        of = replies[0] if served.cell.in_fp8 else computed
        assert max(difference(reply, of) for reply in replies) < served.cell.noise

    def test_it_was_run_as_its_line_says(self, served):
        log, cell = served.log.read_text(errors="replace"), served.cell
        if cell.mode == "in-process":
            layout = re.search(r"serving \d+ cartridges .*, rank 0 of \d, (\S+)", log)[1]
            assert re.fullmatch("heads" if cell.chunk % cell.block else r"\w+/\d+/blocks", layout), layout
        groups = Counter(re.findall(r"KernelGroupInfo.*sw_size_tokens=(-?\d+)", log))
        assert not cell.has_groups or groups == {str(cell.chunk): 3, "-1": 1}, "sliding layers, and a full one"
