"""Stock: vLLM started by its own command serves cartridges too, where its configuration, or LMCache's, names them.

A `vllm.general_plugins` entry point, which vLLM loads in each of its processes. It changes nothing unless something names
cartridges, and imports no LMCache. Without it LMCache would drop our plugin where it cannot load it, as on every CPU engine
under vLLM's own connector, and the server would answer without cartridges.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from contextlib import suppress
from typing import Any

from vllm.logger import init_logger

from ..engine.contract import API_PLUGIN
from ..engine.forms import is_named
from ..engine.host_api import choose_connectors
from ..errors import SettingsError
from .arguments import TRANSFER, Arguments

logger = init_logger("vllm.lmcache_cartridge.serve.stock")
_CONNECTORS = {
    "LMCacheConnectorV1": "lmcache_connector",
    "LMCacheMPConnector": "lmcache_mp_connector",
    "CartridgeConnector": "cartridge_connector",
}
"""vLLM's connectors whose place ours take, and the one under which cartridges were published, which vLLM does not have; and
their modules, which users may name too."""


def register() -> None:
    """Put our connectors in the place of vLLM's, and have vLLM load the request API, where something names cartridges.
    Doing so again is no change.

    Also spare vLLM's own processes the collector's passes over what they have imported.
    """
    choose_connectors(_chosen)
    transfer: Any = None
    with suppress(SettingsError):  # vLLM will say so
        transfer = Arguments(sys.argv[1:]).mapping(TRANSFER)
    if is_named(transfer):
        from .launch import allowed_plugins

        os.environ["VLLM_PLUGINS"] = allowed_plugins()
    if API_PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(",") and multiprocessing.parent_process() is not None:
        gc.freeze()  # as in the API server


def _chosen(transfer: Any) -> tuple[str, str] | None:
    """Return our connector for a transfer configuration; None where vLLM's own choice is right."""
    name = transfer.kv_connector
    theirs = f"vllm.distributed.kv_transfer.kv_connector.v1.{_CONNECTORS.get(name)}"
    if name not in _CONNECTORS or transfer.kv_connector_module_path not in (None, theirs) or not is_named(transfer):
        return None
    logger.info_once("the configuration names cartridges, so lmcache-cartridge's connector takes the place of %s", name)
    if name == "LMCacheMPConnector":
        return "lmcache_cartridge.engine.mp_connector", "CartridgeMPConnector"
    return "lmcache_cartridge.engine.connector", "CartridgeConnector"
