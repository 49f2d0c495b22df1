"""Bench: times of any OpenAI server, with every token computed, with its own prefix cache, and with cartridges."""
