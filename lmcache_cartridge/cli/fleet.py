"""`fleet serve`: which server of a fleet a request should go to, over HTTP."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from .options import Verb
from .show import show


def add(verb: Verb) -> None:
    """Add the command to those of `fleet`."""
    serve = verb(
        "serve",
        _serve,
        "Follow what a fleet's servers hold, and say over HTTP which of them a request should go to. POST /score, POST /pick, "
        "GET /metrics, GET /health. Needs `pip install 'lmcache-cartridge[fleet]'`.",
        "fleet serve --config fleet.yaml",
    )
    serve.add_argument(
        "--config",
        type=Path,
        required=True,
        help="YAML file with the servers; `lmcache-cartridge config fleet.yaml` prints one",
    )


def _serve(arguments: argparse.Namespace) -> None:
    from ..fleet.config import read_config
    from ..fleet.service import Fleet
    from ..fleet.web import serve

    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )  # fmt: skip
    config = read_config(arguments.config)
    fleet = Fleet(config)
    pods = ", ".join(f"{pod.name} ({pod.address})" for pod in fleet.pods)
    show(
        {"listen": config.listen, "pods": [pod.name for pod in fleet.pods]},
        f"{config.listen}: {pods}",
        arguments.format,
    )
    serve(fleet)
