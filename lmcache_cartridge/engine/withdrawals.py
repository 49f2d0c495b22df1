"""Withdrawals: which cartridges have answered prompts that do not name them, and when one of those was last taken back.

vLLM and LMCache keep what was computed from such KV under the prompt's own tokens. So from a withdrawal on the API servers
send such prompts with another `cache_salt`, and nothing of what was kept is found again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3


class Withdrawals:
    """Small files beside the quarantine's, which all processes of one home share. Safe from any thread.

    They outlive the processes, as the copies on LMCache's disks do.
    """

    def __init__(self, quarantine_dir: Path) -> None:
        """Touches no file."""
        self._directory = quarantine_dir / "plain"
        self._last = self._directory / "withdrawn"
        self.noted: set[str] = set()
        """Those that this process has noted and not withdrawn."""

    def note(self, digests: Iterable[str]) -> bool:
        """Note who is about to answer; False where that cannot be noted, so that it must not."""
        new = set(digests) - self.noted
        try:
            if new:
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                with suppress(FileExistsError):
                    os.close(os.open(self._last, os.O_CREAT | os.O_EXCL, 0o600))
                    os.utime(self._last, ns=(0, 0))
            for digest in new:
                (self._directory / digest).touch(0o600)
        except OSError:
            return False
        self.noted.update(new)
        return True

    def earlier(self) -> set[str]:
        """Return those that any process has noted and nobody withdrew."""
        return {path.name for path in self._directory.glob("*")} - {self._last.name}

    def withdraw(self, digests: Iterable[str]) -> None:
        """Take some back that were noted, after nothing of theirs is lent any more. Raises `OSError`; then do it again."""
        for digest in digests:
            os.utime(self._last, ns=(now := max(time.time_ns(), (self.stamp() or 0) + 1), now))
            (self._directory / digest).unlink(missing_ok=True)
            self.noted.discard(digest)

    def stamp(self) -> int | None:
        """Return a number that changes with every withdrawal, 0 before the first; None where nobody ever noted one.

        One look at a file: for each request.
        """
        with suppress(FileNotFoundError):
            return self._last.stat().st_mtime_ns
        return None


def apart(prompt: Any, stamp: int | None) -> Any:
    """Return a prompt that names no cartridge with a `cache_salt` by which it finds nothing of what was withdrawn.

    Each client salt gives another one. Before the first withdrawal it is the prompt as it came.
    """
    if not stamp or not isinstance(prompt, dict):
        return prompt
    salt = f"{stamp} {prompt.get('cache_salt') or ''}".encode("utf-8", "surrogatepass")
    return {**prompt, "cache_salt": blake3(salt).hexdigest()}
