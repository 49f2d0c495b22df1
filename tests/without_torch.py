"""A plugin of pytest for an environment without torch: `.ci/py312` runs all tests with it that do without.

A file or test that ends for want of torch, or of what needs torch itself, is left out, shown in the summary and counted.
`--at-least N` ends with 1 where fewer tests than that passed. No other run of the tests loads this.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

MISSING = re.compile(
    r"No module named '(torch|vllm|lmcache|peft)\b|\b(torch|vllm|lmcache), which is not installed|\b(vllm) is not installed",
    re.IGNORECASE,
)
"""How Python, or this package's command line, says that there is no torch, or nothing that needs it."""
Report = pytest.CollectReport | pytest.TestReport


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--at-least", type=int, default=0, help="end with 1 where fewer tests passed")


def _left_out(report: Any, error: BaseException | None = None) -> Any:
    # A command says it where it ends, a program of a test's own in what the test captured.
    said = f"{report.longrepr}\n{report.capstderr}\n{getattr(error, 'stderr', '')}"
    if report.failed and (missing := MISSING.search(said)):
        name = next(filter(None, missing.groups())).lower()
        report.outcome, report.longrepr = "skipped", (report.nodeid.partition("::")[0], None, f"needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _left_out((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _left_out((yield), call.excinfo.value if call.excinfo else None)


def _passed(config: pytest.Config) -> list[pytest.TestReport]:
    return config.pluginmanager.get_plugin("terminalreporter").stats.get("passed", [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    passed = _passed(config)
    files = {report.nodeid.partition("::")[0] for report in passed}
    left = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    whole = sum("::" not in node for node in left)
    terminalreporter.write_line(
        f"without torch: {len(passed)} tests of {len(files)} files passed, at least {config.getoption('--at-least')} must; "
        f"left out: {whole} whole files, and {len(left) - whole} tests of others"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput") and len(_passed(session.config)) < session.config.getoption(
        "--at-least"
    ):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
