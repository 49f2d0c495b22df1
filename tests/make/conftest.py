"""What tests of making cartridges share."""

from __future__ import annotations

import pytest

from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.make.model import CausalModel


@pytest.fixture(scope="module")
def model():
    """The shipped model."""
    return CausalModel(str(MODEL_DIR))


@pytest.fixture(scope="module")
def ids(model):
    """The tokens of a ward sheet."""
    return model.encode(load_sheet("ward-a").text, special=True)
