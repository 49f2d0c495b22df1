"""Plugin: what vLLM loads in each of its processes, so that a server whose LMCache YAML names cartridges serves them.

A `vllm.general_plugins` entry point. It does nothing unless `LMCACHE_CONFIG_FILE` names our storage plugin, and imports
neither vLLM nor LMCache until then. Without it LMCache would drop our plugin where it cannot load it, as on every CPU
engine under vLLM's own connector, and the server would answer without cartridges.
"""

from __future__ import annotations

import os

from ..settings import is_named

_CONNECTORS = {
    "LMCacheConnectorV1": ("lmcache_cartridge.engine.connector", "CartridgeConnector"),
    "LMCacheMPConnector": ("lmcache_cartridge.engine.mp_connector", "CartridgeMPConnector"),
}
"""vLLM's connectors, and ours, which do the same and check what cartridges need."""


def register() -> None:
    """Put our connectors in the place of vLLM's, and have vLLM load the request API. Doing so again is no change."""
    if not is_named():
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .launch import allowed_plugins

    for name, ours in _CONNECTORS.items():
        del KVConnectorFactory._registry[name]  # a name that vLLM does not know any more must end the start
        KVConnectorFactory.register_connector(name, *ours)
    os.environ["VLLM_PLUGINS"] = allowed_plugins()
