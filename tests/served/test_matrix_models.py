"""The matrix's cells in one process with models that treat positions or heads their own way."""

from __future__ import annotations

from matrix import CellTests, servers

served = servers("in-process")


class TestCells(CellTests):
    pass
