"""A server that makes contexts, by a plugin that fails where a file says so, asked by two API keys."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from matrix import PARALLEL
from processor import noise
from recall.ward import Fact, ask
from serving import SERVER_ARGS, faulty
from templates import IN_TURN, WARD
from waiting import until
from wards import MODEL, Answer, Asker, Ward, content, patients, write_ward

from lmcache_cartridge.library.registry import Registry
from lmcache_cartridge.make.model import CausalModel
from lmcache_cartridge.serve.launch import plan
from lmcache_cartridge.serve.processes import ServerProcess
from lmcache_cartridge.settings import Settings, from_mapping

CHUNK, NOISE = 256, noise(0.25)
WARDS = ("first", "second", "third", "fourth")
KEYS = ("one", "two")
"""The server's API keys."""
ROUTE = "/v1/cartridges"


class Served(NamedTuple):
    """A server, asked by two keys."""

    asker: Asker
    other: Asker
    settings: Settings
    wards: dict[str, Ward]
    fault: Path
    mode: str
    log: Path
    pid: int

    def post(self, asker: Asker | None = None, **body: Any) -> Any:
        return (asker or self.asker).http.post(ROUTE, json=body)

    def made(self, **body: Any) -> dict[str, Any]:
        """Post a context and return it once it is made."""
        reply = self.post(**body)
        assert reply.status_code in (200, 202), reply.text
        found, salt = reply.json(), {name: value for name, value in body.items() if name == "cache_salt"}

        def told() -> Any:
            return self.get(found["id"], **salt).json() if found["state"] == "making" else found

        until(lambda: told()["state"] != "making")
        made = told()
        assert made["state"] in ("resident", "cold"), made
        return made

    def get(self, name: str = "", asker: Asker | None = None, **query: str) -> Any:
        return (asker or self.asker).http.get(f"{ROUTE}/{name}" if name else ROUTE, params=query)

    def named(self, asker: Asker | None = None, **query: str) -> set[str]:
        return {each["id"] for each in self.get(asker=asker, **query).raise_for_status().json()["data"]}

    def delete(self, name: str, asker: Asker | None = None, **query: str) -> int:
        """Delete a context; return the status."""
        return (asker or self.asker).http.delete(f"{ROUTE}/{name}", params=query).status_code

    def patch(self, name: str, asker: Asker | None = None, query: dict[str, str] | None = None, **body: Any) -> Any:
        return (asker or self.asker).http.patch(f"{ROUTE}/{name}", json=body, params=query)

    def naming(self, name: str, asker: Asker | None = None) -> int:
        """Return the status of a completion behind a context."""
        return (asker or self.asker).post(prompt="Q", max_tokens=1, cartridges=[name]).status_code

    @contextmanager
    def failing(self, **how: Any) -> Iterator[None]:
        """Have the plugin fail so meanwhile."""
        self.fault.write_text(json.dumps(how))
        try:
            yield
        finally:
            self.fault.unlink()

    def root(self, name: str) -> Path:
        """Return where a context lies."""
        root = Path(Registry(self.settings.registry_path, read_only=True).find(name).location)
        assert root.is_relative_to(self.settings.contexts_dir) and root.exists()
        return root

    def kill(self) -> None:
        """Kill the server and all that it has started, and they have."""
        family = [self.pid]
        for each in family:
            family += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        for pid in reversed(family):
            os.kill(pid, signal.SIGKILL)

    def places(self) -> set[Path]:
        """Return every directory of a context, half made ones too."""
        return set(self.settings.contexts_dir.glob("*/*"))

    def chats_right(self, name: str, ward: Ward, count: int = 8) -> None:
        """Do as `right` does in a chat."""
        self._all_right(ward, count, lambda fact: self.asker.chat(content(fact), name))

    def right(self, name: str, ward: Ward, count: int = 8, **extra: Any) -> None:
        """Ask facts behind a context, and see that each is answered right from its KV."""
        self._all_right(ward, count, lambda fact: self.asker.complete(ask(fact, 0), name, **extra))

    def _all_right(self, ward: Ward, count: int, answer: Callable[[Fact], Answer]) -> None:
        for fact in ward.facts[:count]:
            found = answer(fact)
            assert (found.text.strip(), found.cached_tokens >= len(ward.ids) // CHUNK * CHUNK) == (fact.value, True)


@contextmanager
def serving(
    home: Path, wards: dict[str, Ward], mode: str, options: tuple[str, ...] = (), **settings: Any
) -> Iterator[Served]:
    """Serve a home, by a plugin that has no faults until a file names some."""
    given = from_mapping({"home": home, "contexts": True, "ready_timeout_s": 600} | settings)
    template = home / "template.jinja"
    template.write_text(f"{{% if in_turn %}}{IN_TURN}{{% else %}}{WARD}{{% endif %}}")
    words = [*SERVER_ARGS, *options, "--chat-template", str(template), "--api-key", *KEYS]
    launch = faulty(plan(MODEL, given, vllm_args=words, mode=mode, l1_bytes=256 << 20))
    fault = home / "fault.json"
    environment = PARALLEL | {"LMCACHE_FAULTY_FILE": str(fault)}
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(launch, home / "log", environment=environment))
        one, two = (stack.enter_context(Asker(server.url, key)) for key in KEYS)
        yield Served(one, two, given, wards, fault, mode, home / "log", server.pid)


@pytest.fixture(scope="module")
def wards():
    """Four sheets without a patient in common."""
    model = CausalModel(MODEL)
    return {name: write_ward(model, patients(i, len(WARDS)), name) for i, name in enumerate(WARDS)}


@pytest.fixture(scope="module", params=["in-process", "multiprocess"])
def served(request, tmp_path_factory, wards):
    """A server in each mode."""
    with serving(tmp_path_factory.mktemp("home"), wards, request.param) as found:
        yield found
