"""Compaction: a document's KV in far fewer positions, in seconds and without training."""
