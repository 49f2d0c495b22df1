"""Every command that README and docs show is typed here as it stands, or at least understood."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from commands import understood

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.serve.launch import Launch, free_port
from lmcache_cartridge.serve.processes import SMALL, ServerProcess

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"quickstart.md"}
"""Typed from top to bottom by `test_quickstart`."""

NOT_TYPED = re.compile(
    r"^lmcache-cartridge (train|evaluate|export|fleet) |^lmcache-cartridge .*(--tier|--library|--lora|multiprocess|\./documents|"
    r"\.jsonl|ward-a|--p |\$MODEL)|^curl .*(/v1/cartridges |ward-a|:30080)|^(LMCACHE_CONFIG_FILE=\S+|vllm|envoy|docker|helm|kubectl|make|"
    r"pip|python|\.venv/bin/python) "
)
"""What needs what other tests make, takes minutes, or wants a network, a GPU, Docker or Kubernetes. Ours are parsed all the same."""


def commands(page: Path) -> list[str]:
    """Return the commands of the shell blocks of a page, each on one line, without comments."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        text = ""
        for line in block.replace("\\\n", " ").splitlines():
            text += " " + (line if text else re.sub(r"(^|\s+)#\s.*$", "", line))
            if text.count("'") % 2 == 0:  # else within a quoted body
                found.append(" ".join(text.strip().removesuffix("&").split()))
                text = ""
    return list(filter(None, found))


SHOWN = list(dict.fromkeys(c for page in PAGES if page.name not in ELSEWHERE for c in commands(page)))
OURS = [command.partition(" > ")[0] for command in SHOWN if command.startswith("lmcache-cartridge ")]


@pytest.mark.parametrize("command", OURS)
def test_a_command_of_the_pages_is_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    understood(command)


BUILD = "lmcache-cartridge build --model ./llama --document handbook.txt --id handbook"
SERVE = "lmcache-cartridge serve ./llama --port 8000 --max-model-len 8192"
IN_A_SHELL = {BUILD, "lmcache-cartridge verify handbook"}
"""As a person types them, each a process of its own; so is what writes to a file."""


def type_(command: str, port: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command as it stands, but for the port: ours in this process, which has imported torch."""
    command = command.replace("localhost:8000", f"localhost:{port}")
    if not command.startswith("lmcache-cartridge ") or command in IN_A_SHELL or " > " in command:
        return subprocess.run(["bash", "-c", command], text=True, capture_output=True, timeout=300)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main(shlex.split(command)[1:])
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def person(tmp_path_factory, moto_server):
    """A person's directory, which this process is in, with what the pages take for granted."""
    directory = tmp_path_factory.mktemp("person")
    (directory / "llama").symlink_to(MODEL_DIR)
    (directory / "handbook.txt").write_text(load_sheet("ward-a").text)
    moto_server.client.create_bucket(Bucket="bucket")
    environment = SMALL | moto_server.environment | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LMCACHE_CARTRIDGE_HOME": str(directory / "home"),
        "AWS_ENDPOINT_URL_S3": moto_server.endpoint, "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield directory


@pytest.fixture(scope="module")
def port(person):
    """Of a server that is what `SERVE` would become, but for its port and that it compiles no model."""
    launches: list[Launch] = []
    for more, version in (("", 1), (" ", 1), (" --canary 'Who is on call?'", 2)):
        done = type_(BUILD + more)
        assert f"handbook@{version}" in done.stdout, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "become", lambda launch: launches.append(launch))
        done = type_(SERVE)
    assert (done.returncode, len(launches)) == (0, 1), done.stderr
    command = [str(MODEL_DIR) if word == "./llama" else word for word in launches[0].command]
    command += ["--enforce-eager", "--served-model-name", "./llama", "--port", str(free_port())]
    with ServerProcess(launches[0]._replace(command=command), person / "log") as server:
        yield server.port


@pytest.mark.parametrize("command", [c for c in SHOWN if not NOT_TYPED.search(c) and c not in (BUILD, SERVE)])
def test_a_command_of_the_pages_does_what_it_says(port, command, tmp_path, monkeypatch):
    if command.startswith(("lmcache-cartridge import", "lmcache-cartridge pull")):
        monkeypatch.setenv("LMCACHE_CARTRIDGE_HOME", str(tmp_path))  # another machine
    done = type_(command, port)
    assert done.returncode == 0, done.stdout + done.stderr
    if command.startswith("curl"):
        answer = json.loads(done.stdout)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
        assert answer["choices"][0]["message"]["content"]
