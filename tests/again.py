"""A file's tests once more, in another file that replaces the fixtures in which it differs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from _pytest.fixtures import FixtureFunctionDefinition


def cases_of(module: ModuleType, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a module's tests and fixtures by name, less those that the other file has in their place."""
    missing = [name for name in without if not hasattr(module, name)]
    assert not missing, f"{module.__name__} has no {missing}"
    return {
        name: value
        for name, value in vars(module).items()
        if (name.startswith("test_") or isinstance(value, FixtureFunctionDefinition)) and name not in without
    }
