"""Stock: vLLM started by its own command serves cartridges too, where its LMCache YAML names them.

A `vllm.general_plugins` entry point, which vLLM loads in each of its processes. It does nothing unless
`LMCACHE_CONFIG_FILE` names our storage plugin or `VLLM_PLUGINS` our request API, and imports neither vLLM nor LMCache
until then. Without it LMCache would drop our plugin where it cannot load it, as on every CPU engine under vLLM's own
connector, and the server would answer without cartridges.
"""

from __future__ import annotations

import gc
import multiprocessing
import os

from ..engine.contract import API_PLUGIN
from ..settings import is_named

_CONNECTORS = {
    "LMCacheConnectorV1": ("lmcache_cartridge.engine.connector", "CartridgeConnector"),
    "LMCacheMPConnector": ("lmcache_cartridge.engine.mp_connector", "CartridgeMPConnector"),
}
"""vLLM's connectors, and ours, which do the same and check what cartridges need."""


def register() -> None:
    """Put our connectors in the place of vLLM's, and have vLLM load the request API. Doing so again is no change.

    Also spare vLLM's own processes the collector's passes over what they have imported.
    """
    if is_named():
        from ..engine.host_api import replace_connectors
        from .launch import allowed_plugins

        replace_connectors(_CONNECTORS)
        os.environ["VLLM_PLUGINS"] = allowed_plugins()
    if API_PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",") and multiprocessing.parent_process() is not None:
        spare_imports()


def spare_imports() -> None:
    """Have the garbage collector leave out all that this process has made so far, most of it modules.

    vLLM does so at the end of its start. Until then each of its full collections goes through a million objects: half a
    second, several times. Cycles that are garbage by now are kept; reference counts work as ever.
    """
    gc.freeze()
