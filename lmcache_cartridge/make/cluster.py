"""Cluster: the documents of a corpus, made on the machines of a Ray cluster and published."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from ..errors import SourceError
from ..settings import Settings
from .batch import Batch, Recipe
from .corpus import Row, Source


class _Worker(Batch):
    """Holds the model on one machine."""

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        return self.add(Source(**item))._asdict()


def rows(address: str, recipe: Recipe, sources: Sequence[Source], settings: Settings) -> Iterator[Row]:
    """Yield what becomes of each document, in any order, as `Batch.add` does; `settings` name the library.

    Each GPU has a worker, or where there is none each core. What was under way on a machine that dies goes to others,
    which leave what was published of it as it is. Raises `SourceError` where the cluster cannot be reached, or no worker begin.
    """
    import ray
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with redirect_stdout(sys.stderr):  # where Ray tells of nodes that died, until it is shut down
        try:
            if port.isdecimal():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), 30).close()
            ray.init(address=address, log_to_driver=False)
            has = ray.cluster_resources()
            made = ray.data.from_items([source._asdict() for source in sources]).map(
                _Worker,  # type: ignore[arg-type]  # a class is called for its instances
                fn_constructor_args=(recipe, settings),
                concurrency=(1, int(has.get("GPU") or has["CPU"])),
                num_gpus=int("GPU" in has),
            )
            yield from (Row(**row) for row in made.iter_rows())
        except (ray.exceptions.RayError, OSError) as error:
            raise SourceError(f"Ray at {address}: {error}") from error
        finally:
            ray.shutdown()
