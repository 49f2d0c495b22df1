"""The matrix's cells of the shipped model beside LMCache's server."""

from __future__ import annotations

from shipped import ShippedTests, cells, made, served  # noqa: F401

cell = cells("multiprocess")


class TestCells(ShippedTests):
    pass
