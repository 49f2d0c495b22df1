"""Multiprocess mode answers as full prefill does from KV that transformers alone computed, and only from the right bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from serving import SERVER_ARGS, Client, Reply, difference, question_ids, register_kv, stored_kv
from test_end_to_end import (  # noqa: F401 - the tests run here too, over this module's server
    CHUNK,
    DAMAGE,
    DOCUMENTS,
    NOISE,
    WHOLE_CHUNKS,
    Served,
    _build,
    _flip_a_bit,
    test_a_cartridge_of_any_length_answers_as_full_prefill_does,
    test_a_flipped_bit_is_refused_and_noted_and_the_document_computed,
    test_a_prompt_that_ends_inside_the_document_uses_its_whole_chunks,
    test_concurrent_requests_over_three_cartridges_get_their_own_answers,
    test_damaged_kv_changes_the_answers_so_the_comparison_can_see_it,
    test_the_shipped_questions_are_answered_right_from_the_cartridge,
)

from lmcache_cartridge.artifact import reading
from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import from_mapping

BLOCK = 32
"""vLLM's block: whole chunks must be whole blocks here."""
WHOLE = CHUNK * WHOLE_CHUNKS["a"]


class NamingClient(Client):
    """Asks for a trained cartridge by its name: the request API sets the tag."""

    names: dict[str, str]

    def ask(self, ids: list[int], tag: str | None = None, tokens: int = 4) -> Reply:
        """Return the reply to a prompt, of which the cartridge with the digest `tag` takes the first positions."""
        if tag is None:
            return super().ask(ids, None, tokens)
        body = {
            "prompt": ids[WHOLE:],
            "cartridges": [self.names[tag]],
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 20,
        }
        response = self.post(body)
        response.raise_for_status()
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"] or 0
        return Reply(choice["text"], choice["logprobs"]["top_logprobs"], usage["prompt_tokens"], cached)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    settings = from_mapping({"home": home, "cpu_bytes": 64 << 20, "lookup_timeout_s": 10, "plain_prompts": "all"})
    registry, model = Registry(settings.registry_path), CausalModel(str(MODEL_DIR))
    ids = {name: _build(model, registry, settings, name) for name in (*DOCUMENTS, "flipped")}
    _flip_a_bit(settings.cartridges_dir / "flipped")
    root = settings.cartridges_dir / "a"
    made, like = stored_kv(root)[:, :, :WHOLE], reading.load_manifest(root)
    variants = {"made": made} | {name: damage(made) for name, damage in DAMAGE.items()}
    trained = {
        name: register_kv(
            registry, home / "variants", name.replace(" ", "-").replace("/", "-"), kv, like, np.array(ids["a"][:WHOLE])
        )
        for name, kv in variants.items()
    }
    launch = plan(
        str(MODEL_DIR), settings, chunk_tokens=CHUNK, on_load_failure="fail", mode="multiprocess",
        vllm_args=[*SERVER_ARGS, "--block-size", str(BLOCK)],
    )  # fmt: skip
    log = home / "server.log"
    with ServerProcess(launch, log) as server, NamingClient(server.url, str(MODEL_DIR)) as client:
        client.names = {manifest.digest: manifest.name for manifest in trained.values()}
        for name in DOCUMENTS:  # the engine is tried with each, and from then on plain prompts are answered from it
            client.post({"prompt": [5], "cartridges": [name], "max_tokens": 1}).raise_for_status()
        yield Served(client, log, model, settings, ids, trained)


def test_kv_made_by_transformers_and_named_answers_as_full_prefill_does(served: Served) -> None:
    for question in load_sheet("ward-a").questions[:6]:
        prompt = served.ids["a"] + question_ids(served.model, question.text)
        reply = served.client.ask(prompt, tag=served.trained["made"].digest)
        assert reply.cached_tokens == WHOLE
        assert reply.prompt_tokens == len(prompt)
        assert difference(reply, served.client.computed(prompt)) < NOISE


def test_a_plain_prompt_of_a_trained_cartridges_ids_gets_the_document_and_not_the_cartridge(served: Served) -> None:
    prompt = served.ids["a"][:WHOLE] + [5]
    plain = served.client.ask(prompt)
    assert plain.cached_tokens == WHOLE, "the prefill cartridge with the same ids"
    assert difference(plain, served.client.computed(prompt)) < NOISE
    zeroed = served.client.ask(prompt, tag=served.trained["zeroed"].digest)
    assert difference(zeroed, plain) > 5 * NOISE
    assert difference(served.client.ask(prompt), plain) < NOISE, "what the other request had stayed with it"


def test_lmcache_was_asked(served: Served) -> None:
    log = (served.settings.home / "server.log").read_text(errors="replace")
    assert re.search(r"this engine writes KV as (vec|amx)/32/blocks;", log)
    assert "Retrieved" in log
