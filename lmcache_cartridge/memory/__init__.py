"""Bytes in memory as the engine wants them: layout, RoPE shift, loading, the tiers, the store and its claims."""
