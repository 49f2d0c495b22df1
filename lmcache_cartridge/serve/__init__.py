"""The edge that engines touch: LMCache's plugin, vLLM's connector, and starting both."""
