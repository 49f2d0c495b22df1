"""Callback of the vLLM production stack's router: requests for one cartridge go to one engine.

Put this file and `lmcache_cartridge/fleet/affinity.py` into one directory of the router's PYTHONPATH (a ConfigMap does),
and start the router with

    --routing-logic session --session-key affinity_key --callbacks cartridge_affinity.callbacks

The router reads the session key from the dict that `pre_request` gets, and forwards the body as the client sent it.
Requests without a cartridge have no key and go to the engine with the fewest requests.
"""

import json
import os

try:
    from affinity import Naming, affinity_key, model_ids
except ImportError:  # the package is installed
    from lmcache_cartridge.fleet.affinity import Naming, affinity_key, model_ids

KEY = "affinity_key"
"""Not one of our own fields: the engine ignores it should the router write the body anew."""


class Callbacks:
    """Sets the session key. `CARTRIDGE_NAMING`, JSON, holds the engines' settings that `Naming` lists."""

    def __init__(self) -> None:
        self.naming = Naming(**json.loads(os.environ.get("CARTRIDGE_NAMING", "{}")))

    def pre_request(self, request, request_body, request_json):
        """Note the affinity key in `request_json`, which routing reads afterwards; returning None lets it go on."""
        if not isinstance(request_json, dict):
            return
        key = affinity_key(request_json, request.headers.getlist("x-cartridges"), naming=self.naming)
        if not key:
            return
        request_json[KEY] = key
        model = request_json.get("model")
        base = max((m for m in self.naming.models if f"{model}".startswith(f"{m}:")), key=len, default=None)
        if base is not None and (ids := model_ids(model, self.naming)):
            # The router looks for engines that list the model: they list `MODEL`, and not every `MODEL:CARTRIDGE`.
            request_json.setdefault("cartridges", ids)
            request_json["model"] = base
        return

    def post_request(self, request, response_content):
        """Nothing is left to do."""


callbacks = Callbacks()
