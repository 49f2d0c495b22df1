"""The matrix's cells beside LMCache's server with models that treat positions or heads their own way."""

from __future__ import annotations

from matrix import CellTests, servers

served = servers("multiprocess")


class TestCells(CellTests):
    pass
