"""The matrix's cells of the shipped model in one process."""

from __future__ import annotations

from shipped import ShippedTests, cells, made, served  # noqa: F401

cell = cells("in-process")


class TestCells(ShippedTests):
    pass
