"""What vLLM and LMCache do not promise is in three files, and found missing when something starts, not by a request."""

from __future__ import annotations

import re
import warnings
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
from test_structure import FILES, PACKAGE, SOURCES, imports

from lmcache_cartridge.engine import host, host_inprocess
from lmcache_cartridge.engine.versions import PROVEN
from lmcache_cartridge.errors import UnsupportedEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of others, as they are imported
    for _path in [path for names in host.NAMES.values() for path in names]:
        host.module(_path.partition(":")[0])

HOSTS = [f"{PACKAGE}.engine.{name}" for name in ("host", "host_api", "host_inprocess")]
PROMISED = {
    "vllm", "vllm.config", "vllm.logger", "vllm.exceptions", "vllm.sampling_params", "vllm.engine.protocol",
    "vllm.v1.kv_cache_interface", "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector", "vllm.benchmarks.datasets", "vllm.benchmarks.serve",
    "lmcache.integration.vllm.lmcache_mp_connector", "lmcache.integration.vllm.lmcache_mp_metadata", "lmcache.cli.main",
    "lmcache.v1.config", "lmcache.logging", "lmcache.utils", "lmcache.lmcache_native", "lmcache.v1.platform",
    "lmcache.v1.memory_management", "lmcache.v1.gpu_connector.gpu_connectors", "lmcache.v1.distributed.api",
    "lmcache.v1.storage_backend.abstract_backend", "lmcache.v1.distributed.internal_api",
    "lmcache.v1.distributed.l2_adapters.base",
}  # fmt: skip
"""Of what other files may import: what is documented, what a plugin or connector is built on or handed, and, where its absence
is told by the command that wants it, what `vllm bench serve` is made of."""


@pytest.fixture(params=[(part, path) for part, names in host.NAMES.items() for path in names], ids=lambda p: p[1])
def taken(request, monkeypatch):
    """A part and one of its names, which is not there any more."""
    part, path = request.param
    module, _, attributes = path.partition(":")
    *owners, last = attributes.split(".")
    owner = reduce(getattr, owners, host.module(module))
    monkeypatch.delattr(owner, last)
    return part, path


def test_a_name_that_is_gone_is_named_at_start_with_the_versions(taken):
    part, path = taken
    with pytest.raises(UnsupportedEngine) as refused:
        host.verify(part)
    assert path.rpartition(":")[2] in str(refused.value)
    assert all(f"{name} {version}" in str(refused.value) for name, version in PROVEN.items())


@pytest.mark.parametrize(
    ("part", "path", "changed"),
    [
        ("in-process", "lmcache.integration.vllm.vllm_v1_adapter:LoadSpec", lambda vllm, lmcache: None),
        (
            "multiprocess",
            "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector.get_num_new_matched_tokens",
            lambda self, request, computed: (0, False),  # does not ask for a tracker by the name that we override
        ),
        ("api", "vllm.exceptions:GenerationError", lambda text: ValueError()),
    ],
)
def test_a_name_that_means_something_else_is_refused(part, path, changed, monkeypatch):
    module, _, attributes = path.partition(":")
    monkeypatch.setattr(f"{host.module(module).__name__}.{attributes}", changed)
    with pytest.raises(UnsupportedEngine, match=attributes.partition(".")[0]):
        host.verify(part)


# Names of live objects.


def test_another_way_of_naming_chunks_is_refused_at_start():
    def hasher(process: Any) -> Any:
        database = SimpleNamespace(process_tokens=process)
        return host_inprocess.hasher(SimpleNamespace(token_database=database, config=SimpleNamespace(chunk_size=4)))

    def sound(tokens: list[int], make_key: bool) -> Any:
        return iter([(n, n + 4, n) for n in range(0, len(tokens) - 3, 4)])

    assert hasher(sound)(list(range(9))) == [0, 4]
    for other in (lambda tokens, make_key: iter([(0, 4, "a key")]), lambda tokens: 1):
        with pytest.raises(UnsupportedEngine, match="process_tokens"):
            hasher(other)


def test_a_connector_that_does_not_ask_for_the_models_name_is_refused():
    with host.model_name("mine"):
        connector = host.module("lmcache.integration.vllm.lmcache_mp_connector")
        assert connector.get_dcp_decorated_model_name("a", "b") == "mine"
    with pytest.raises(UnsupportedEngine, match="get_dcp_decorated_model_name"), host.model_name("mine"):
        pass


@pytest.mark.parametrize(
    ("mode", "device", "moves"),
    [(None, "cuda", True), ("auto", "cuda", True), ("engine_driven", "cuda", False), (None, "cpu", False)],
)
def test_lmcaches_server_moves_blocks_itself_on_gpus_unless_told_otherwise(mode, device, moves):
    transfer = SimpleNamespace(kv_connector_extra_config={"lmcache.mp.mp_transfer_mode": mode})
    config = SimpleNamespace(kv_transfer_config=transfer, device_config=SimpleNamespace(device_type=device))
    assert host.maps_caches(config) == moves


# Where such names stand.


@pytest.mark.parametrize("module", [m for m in FILES if m not in HOSTS])
def test_no_other_file_uses_what_is_not_promised(module):
    """But for types."""
    read = re.sub(r"(?m)^if TYPE_CHECKING:\n(?:(?: .*)?\n)+", "", SOURCES[module])
    theirs = [name for name in sorted(imports(read, module)) if name.partition(".")[0] in ("vllm", "lmcache")]
    assert [name for name in theirs if not {name, name.rpartition(".")[0]} & PROMISED] == []
