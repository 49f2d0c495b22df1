"""Inside vLLM's workers and LMCache: storage plugin, L2 adapter, connectors, injection, control."""
