"""The matrix's cells with models that treat positions, heads or blocks each its own way."""

from __future__ import annotations

import pytest
from cells import CELLS
from matrix import CellTests, serve_family


@pytest.fixture(scope="module", params=[name for name, cell in CELLS.items() if cell.model != "shipped"])
def served(request, tmp_path_factory):
    with serve_family(request.param, tmp_path_factory.mktemp("cell")) as served:
        yield served


class TestCells(CellTests):
    pass
