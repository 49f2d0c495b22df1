"""The matrix's cells with models that treat positions, heads or blocks each its own way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cells import CELLS
from matrix import CellTests, Served, serve_family


@pytest.fixture(scope="module", params=[name for name, cell in CELLS.items() if cell.model != "shipped"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_family(request.param, tmp_path_factory.mktemp("cell")) as served:
        yield served


class TestCells(CellTests):
    pass
