"""Every command that README and docs show is typed here as it stands, or named below with who else runs it, or why nobody does."""

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
from typing import NamedTuple

import pytest

from lmcache_cartridge.cli.main import main
from lmcache_cartridge.cli.recall import MODEL_DIR, load_sheet
from lmcache_cartridge.serve.launch import Launch, free_port
from lmcache_cartridge.serve.processes import SMALL, ServerProcess

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"quickstart.md"}
"""Typed from top to bottom by `test_quickstart`."""

BY_OTHERS = {
    'curl http://localhost:8000/v1/cartridges -H \'Content-Type: application/json\' -d \'{"id": "handbook", "document": "Annual leave is 25 days. ...", "ttl": 86400, "labels": ["policy"]}\'': "served/test_contexts.py",
    "lmcache-cartridge train --model ./llama --document handbook.txt --id handbook --compress 4x "
    "--questions questions.jsonl --no-promote": "make/test_train.py",
    "lmcache-cartridge build ./documents --model ./llama": "make/test_corpus.py",
    "lmcache-cartridge train ./documents --model ./llama --compress 4x --self-study 400": "make/test_corpus.py",
    "lmcache-cartridge build notes.jsonl --model ./llama --ray auto --publish s3://cartridges/fleet": "make/test_cluster.py",
    "lmcache-cartridge evaluate handbook@2 --questions asked.jsonl --url http://localhost:8000 "
    "--output report": "make/test_evaluate.py",
    "lmcache-cartridge import ward-a-adapter --model $MODEL --id ward-a --document ward-a.txt --round": "make/test_convert.py",
    "lmcache-cartridge serve $MODEL --port 8000 --max-model-len 4096": "make/test_cache_served.py",
    "lmcache-cartridge verify ward-a": "make/test_convert.py",
    "lmcache-cartridge show ward-a": "make/test_convert.py",
    "curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' -d "
    '\'{"model": "\'$MODEL\'", "cartridges": ["ward-a"], "prompt": "Q: blood of Tehor? A:", '
    '"max_tokens": 1}\'': "make/test_cache_served.py",
    "lmcache-cartridge build --model ./llama --lora ./nurse --document handbook.txt --id handbook-nurse": "engine/test_adapters.py",
    "lmcache-cartridge serve ./llama --enable-lora --lora-modules nurse=./nurse": "served/test_lora.py",
    "lmcache-cartridge export ward-a --to peft --output adapter": "make/test_convert_export.py",
    "lmcache-cartridge export ward-a --to hazy --output checkpoint": "make/test_convert_export.py",
    "lmcache-cartridge serve ./llama --mode multiprocess --port 8000 --max-model-len 8192": "served/test_l2_saving.py",
    "lmcache-cartridge bench --url http://localhost:8000 --model ./llama --p 256,512 --c 1,2": "served/test_api.py",
    "lmcache-cartridge validate --url http://localhost:8000 --model ./llama --tier 0,0.5,3cross,10": "served/test_canary_served.py",
    "lmcache-cartridge validate --url http://localhost:8000 --cartridges handbook --tier 0,1b,4": "validate/test_validate.py",
    "lmcache-cartridge serve ./llama --mode multiprocess --port 8000 --l1-bytes 4GiB --l2-adapter "
    '\'{"type": "fs", "base_path": "/var/cache/lmcache"}\'': "served/test_l2_saving.py",
    **dict.fromkeys(
        [
            "lmcache-cartridge publish handbook --library s3://cartridges/fleet --label current",
            "lmcache-cartridge list --library s3://cartridges/fleet",
            "lmcache-cartridge label handbook handbook@2 --library s3://cartridges/fleet",
            "lmcache-cartridge label current handbook@2 --library s3://cartridges/fleet",
            "lmcache-cartridge remove handbook@1 --library s3://cartridges/fleet",
        ],
        "library/test_published_cli.py",
    ),
    "lmcache-cartridge serve ./llama --library s3://cartridges/fleet --port 8000": "served/test_contexts_published.py",
    "lmcache-cartridge fleet serve fleet.yaml": "fleet/test_fleet_scores.py",
    "envoy -c envoy.yaml": "fleet/test_routers.py",
    "vllm serve ./llama --kv-transfer-config '{ "
    '"kv_connector": "CartridgeConnector", "kv_role": "kv_both", '
    '"kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.cartridge_connector", '
    '"kv_connector_extra_config": {"cartridges": {"handbook": "/srv/cartridges/handbook/1"}, '
    '"router": {"type": "label", "field": "cartridge_id"}}}\'': "served/test_forms_served.py",
    "LMCACHE_CONFIG_FILE=lmcache.yaml vllm serve ./llama --kv-transfer-config '{ "
    '"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer"}\'': "served/test_matrix_models.py",
    "lmcache-cartridge serve ./llama --library s3://cartridges/fleet --set drain_s=15 --shutdown-timeout 60": "fleet/test_fleet.py",
}
"""Commands that need what other tests make, and which of them run the same."""

BY_NOBODY = {
    "lmcache-cartridge bench --model ./llama --p 256,1024,4096 --output bench-llama": "starts a server and takes minutes",
    "make demo": "it is the first of the two commands; its parts are `build` and `serve`, and CI runs the second",
    "make test": "it runs this",
    "make lint": "CI runs it after this",
    "make .venv/ready": "`make test` did it",
    "make cartridges-test TIER=0,3cross": "it is `validate --model`, which takes two minutes",
    "lmcache-cartridge validate --model ./llama --tier all": "takes ten minutes; `make cartridges-test TIER=all` is the same",
    "make bench": "takes a quarter of an hour; test_benchmarks runs each benchmark with --smoke",
    "lmcache-cartridge serve ./gemma --mode multiprocess --no-save --no-disable-hybrid-kv-cache-manager": "needs a GPU; the "
    "page says that it was never run, and test_groups_served runs the same on a CPU",
    "python benchmarks/gpu.py": "takes ten minutes and a GPU; test_gpu_benchmark.py runs it with --smoke on the CPU",
    "python benchmarks/scale.py --full": "takes ten minutes; test_benchmarks runs it with --smoke",
    "pip install .": "test_doctor builds the wheel and looks into it; installing one needs the network",
    ".venv/bin/python -m pytest tests/artifact/test_manifest.py -q": "it is a part of `make test`",
    '.venv/bin/python -m pytest -q -k "repaired_is_served_again"': "it is a part of `make test`",
    **dict.fromkeys(
        [
            "docker build -f configs/docker/Dockerfile -t registry.example/lmcache-cartridge:vllm-0.32.0 .",
            "docker push registry.example/lmcache-cartridge:vllm-0.32.0",
            "kubectl create secret generic cartridges --from-literal=AWS_ACCESS_KEY_ID=$KEY_ID "
            "--from-literal=AWS_SECRET_ACCESS_KEY=$KEY "
            "--from-literal=LMCACHE_CARTRIDGE_SALT_SECRET=$(openssl rand -hex 32)",
            "kubectl create configmap cartridges-affinity --from-file=cartridge_affinity.py --from-file=affinity.py",
            "helm repo add vllm https://vllm-project.github.io/production-stack",
            "helm install vllm vllm/vllm-stack --version 0.1.12 -f values.yaml",
            "kubectl get pods",
            "kubectl logs deployment/vllm-llama-0-deployment-vllm",
            "kubectl port-forward svc/vllm-router-service 30080:80",
            "curl http://localhost:30080/v1/models",
            "curl -i http://localhost:30080/v1/chat/completions -H 'Content-Type: application/json' -d '{ "
            '"model": "meta-llama/Llama-3.1-8B-Instruct", "cartridges": ["handbook"], '
            '"messages": [{"role": "user", "content": "Who is on call on Sundays?"}]}\'',
            "kubectl exec deployment/vllm-llama-0-deployment-vllm -- lmcache-cartridge top --once",
            "helm uninstall vllm",
            "kubectl delete configmap cartridges-affinity",
            "kubectl delete secret cartridges",
        ],
        "needs Docker or Kubernetes; the page says that it was not run",
    ),
}


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


SHOWN = {page.name: commands(page) for page in PAGES if page.name not in ELSEWHERE}
TYPED = [c for found in SHOWN.values() for c in found if c not in BY_OTHERS and c not in BY_NOBODY]


def test_there_are_commands_and_none_is_listed_that_is_not_shown():
    shown = {command for found in SHOWN.values() for command in found}
    assert len(shown) > 25
    assert {*BY_OTHERS, *BY_NOBODY} - shown == set()
    for test in BY_OTHERS.values():
        assert (ROOT / "tests" / test).exists()


class Shell(NamedTuple):
    """A person's shell, in a directory with what the pages take for granted, before a server that is up."""

    directory: Path
    environment: dict[str, str]
    port: int

    def type(self, command: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command as it stands, but for the port and the bucket: ours in this process, which has imported torch."""
        words, out, err = shlex.split(self.own(command)), io.StringIO(), io.StringIO()
        environment = self.environment | more
        if words[0] != "lmcache-cartridge" or command in IN_A_SHELL:
            return subprocess.run(
                ["bash", "-c", self.own(command)], cwd=self.directory, env=environment, text=True, capture_output=True,
                timeout=300,
            )  # fmt: skip
        *words, file = (words[:-2] + words[-1:]) if ">" in words else [*words, None]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.chdir(self.directory)
            for name, value in environment.items():
                patch.setenv(name, value)
            status = main(words[1:])
        if file is not None:
            (self.directory / file).write_text(out.getvalue())
        return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())

    def own(self, command: str) -> str:
        return command.replace("localhost:8000", f"localhost:{self.port}").replace("--port 8000", f"--port {self.port}")


BUILD = "lmcache-cartridge build --model ./llama --document handbook.txt --id handbook"
SERVE = "lmcache-cartridge serve ./llama --port 8000 --max-model-len 8192"
IN_A_SHELL = {BUILD, "lmcache-cartridge verify handbook", "lmcache-cartridge config lmcache.yaml > lmcache.yaml"}
"""As a person types them, each a process of its own."""


@pytest.fixture(scope="module")
def author(tmp_path_factory, moto_server):
    """Before the server is up."""
    directory = tmp_path_factory.mktemp("person")
    (directory / "llama").symlink_to(MODEL_DIR)
    sheet = load_sheet("ward-a")
    (directory / "handbook.txt").write_text(sheet.text)
    environment = os.environ | SMALL | moto_server.environment | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LMCACHE_CARTRIDGE_HOME": str(directory / "home"),
        "LMCACHE_CARTRIDGE_CACHE": str(directory / "cache"),
        "AWS_ENDPOINT_URL_S3": moto_server.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    moto_server.client.create_bucket(Bucket="bucket")
    return Shell(directory, environment, free_port())


@pytest.fixture(scope="module")
def shell(author):
    """Before a server that is what `SERVE` would become, but for its port and that it compiles no model."""
    launches: list[Launch] = []
    for more, version in (("", 1), (" ", 1), (" --canary 'Who is on call?'", 2)):
        done = author.type(BUILD + more)
        assert f"handbook@{version}" in done.stdout, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "become", lambda launch: launches.append(launch))
        done = author.type(SERVE)
    assert (done.returncode, len(launches)) == (0, 1), done.stderr
    own = ["--enforce-eager", "--served-model-name", "./llama"]
    command = [str(MODEL_DIR) if word == "./llama" else word for word in launches[0].command]
    launch = launches[0]._replace(command=[*command, *own])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in author.environment.items():
            if name.startswith(("AWS_", "LMCACHE_")):
                patch.setenv(name, value)
        server = ServerProcess(launch, author.directory / "log")
    with server:
        yield author._replace(port=server.port)


@pytest.mark.parametrize("command", sorted(set(TYPED) - {BUILD, SERVE}, key=TYPED.index))
def test_a_command_of_the_pages_does_what_it_says(shell, command):
    words, more = shlex.split(command), {}
    if words[:3] == ["lmcache-cartridge", "import", "s3://bucket/handbook"] or words[:2] == [
        "lmcache-cartridge",
        "pull",
    ]:
        more = {"LMCACHE_CARTRIDGE_HOME": str(shell.directory / words[1])}  # another machine
        if not (shell.directory / "pushed").exists():
            assert shell.type("lmcache-cartridge publish handbook s3://bucket/handbook").returncode == 0
            (shell.directory / "pushed").touch()
    done = shell.type(command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[0] == "curl":
        answer = json.loads(done.stdout)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
        assert answer["choices"][0]["message"]["content"]
