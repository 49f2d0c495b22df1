"""The matrix's cells beside LMCache's server with models that treat positions or heads their own way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix import CELLS, CellTests, Served, serve_family


@pytest.fixture(scope="module", params=[n for n, cell in CELLS.items() if cell.mode == "multiprocess"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_family(request.param, tmp_path_factory.mktemp("cell")) as served:
        yield served


class TestCells(CellTests):
    pass
