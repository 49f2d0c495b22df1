"""Contract: the names on which the API server, the connectors, the plugins and the commands that start them agree.

Imports nothing, so that every process can read it.
"""

TAG = "lmcache.tag.cartridge"
"""The key in `kv_transfer_params` whose value LMCache puts into its own keys: the digests of the chain, joined by dots."""
COMPUTED = "computed"
"""A tag that no cartridge has: a request with it gets nothing injected."""
TENANT = "lmcache.tag.cartridge-tenant"
"""The key in `kv_transfer_params` by which LMCache in-process keeps apart what it saves for requests of different salts."""
ADAPTER = "lmcache.tag.cartridge-adapter"
"""The same for requests of different LoRA adapters, and of the base model."""
CAPTURE = "lmcache.tag.capture"
"""The key in `kv_transfer_params` of a request whose KV a client means to fetch, under a name of its own."""
GRANT = "cartridge"
"""The key in `kv_transfer_params` that tells our connector of the request's claim: how many leading `positions` are of its
cartridges, how many of them must be injected, not computed (`must_inject`), how many are in memory (`resident`), the
client's own `salt`, and whose KV it is (`adapter`): the `adapter_name` of the LoRA adapter that computes the request, empty
for the base model."""
SKIP_SAVE, MAX_OFFLOAD = "lmcache.skip_save", "lmcache.max_offload_tokens"
"""LMCache's switches of one request: save nothing of it, and save so many leading tokens at most."""
PUBLISHED = "vllm.distributed.kv_transfer.kv_connector.v1.cartridge_connector"
"""The module under which a `CartridgeConnector` was published. vLLM has none; ours is taken where a user names it."""
CONTROL = "cartridge.control"
"""Key in `kv_connector_extra_config` whose value is the path of the L2 adapter's socket."""
REQUEST_API = "cartridge.request_api"
"""Key in `kv_connector_extra_config`: "off" for a server on which no request may name cartridges."""
API_PLUGIN = "cartridges"
"""The name of our entry point among vLLM's endpoint plugins."""
CONTROL_METHOD = "cartridge_control"
"""The method that our connectors add to vLLM's workers: it returns the path of a worker's control socket."""
NULL_BLOCK = 0
"""The block that vLLM gives all requests for positions that a window has left behind: what is in it is nobody's."""
