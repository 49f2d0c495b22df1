"""Faults in multiprocess mode: the tests of `test_faults`, on vLLM beside LMCache's server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import test_faults
from recall.ward import ask, encode
from serving import faulty
from test_faults import FaultTests, broken, served  # noqa: F401
from waiting import until

from lmcache_cartridge.serve.launch import Launch


def test_a_chunk_lost_after_the_lookup_is_an_error_or_the_documents_answer(served, broken):  # noqa: F811
    """LMCache folds what it got to a prefix before vLLM hears of it, so a document is computed from there on. It waits for the
    lost one for four seconds, so all are asked at once. That the first one is lost is seen below."""
    chunk = 15
    broken(drop=chunk)
    trained = served.sound["trained"]
    with ThreadPoolExecutor(2) as pool:
        refused = pool.submit(test_faults._refused, served, "trained", trained)
        assert "ask again" in pool.submit(test_faults._refused_in_stream, served, "trained", trained).result()
    status, headers = refused.result()
    assert (status, headers["retry-after"]) == (503, "1")
    asked = [(name, ask) for name in ("whole", "prefill") for ask in (test_faults._ask, test_faults._stream)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda each: each[1](served, each[0], served.sound[each[0]]), asked))
    for (name, _), reply in zip(asked, replies, strict=True):
        assert reply.text.strip() == served.sound[name].facts[0].value
        document = name == "whole"
        assert reply.used == f"{name}@1;positions={test_faults.POSITIONS}" + ";served=document" * document
        assert reply.cached_tokens == (0 if document else chunk * test_faults.CHUNK)


@pytest.mark.parametrize("chunk", [0, 15])
def test_nothing_is_saved_of_a_request_whose_trained_cartridge_was_lost(
    served,  # noqa: F811
    broken,  # noqa: F811
    chunk,
):
    """Its text is longer than the cartridge, and all of it is scheduled in the step in which vLLM ends it."""
    text = served.sound["prefill"].ids[1:]
    own = text + text[:100] + encode(ask(served.sound["trained"].facts[0], 0))
    given = {"prompt": own, "cartridges": "trained", "cache_salt": f"lost-{chunk}"}
    broken(drop=chunk)
    with pytest.raises(openai.APIStatusError):
        served.asker.complete(**given)
    broken()
    again = served.asker.complete(**given)
    assert again.cached_tokens == test_faults.POSITIONS, "something was saved that was computed after nothing"
    saved = test_faults.POSITIONS + len(own) // test_faults.CHUNK * test_faults.CHUNK

    def is_saved() -> bool:
        served.asker.http.post("/reset_prefix_cache").raise_for_status()
        return served.asker.complete(**given).cached_tokens == saved

    until(is_saved)  # the control: what is computed after it is saved


class TestFaults(FaultTests):
    """They come after the one above: once requests for it were refused, LMCache 0.5.6 may still hold a document's chunks,
    and does not ask for them again. Those that are None are of the request API, which is the same beside both."""

    test_a_chunk_lost_after_the_lookup_is_an_error_or_the_documents_answer = None
    test_options_that_need_the_prompt_computed_are_for_prefill_cartridges_alone = None
    test_truncation_is_of_the_clients_text_and_a_prompt_that_is_only_the_cartridge_is_refused = None


@pytest.fixture(scope="module")
def planned():
    def asking_each_time(launch: Launch) -> Launch:
        """LMCache must ask for every chunk each time, not keep what it once had."""
        launch = faulty(launch)
        return launch._replace(lmcache=[word.replace("retain", "default") for word in launch.lmcache])

    # Whole chunks must be whole blocks, which are of 128 tokens on CPU where nothing is said.
    return ["--block-size", "32"], {"mode": "multiprocess", "change": asking_each_time}
