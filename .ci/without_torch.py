"""Print what this package, its extras and its tests require and that needs no torch, as pinned in this environment."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("s3", "fleet", "train", "test")


def _requires(name: str, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        if wanted.marker is None or any(
            wanted.marker.evaluate({"extra": extra, "python_version": "3.12"}) for extra in ("", *extras)
        ):
            yield canonicalize_name(wanted.name), tuple(wanted.extras)


def _collect(name: str, extras: tuple[str, ...], found: dict[str, set[str]]) -> None:
    """Put what a package requires into `found`, and what each of those does; optional ones that are not here are left out."""
    if name in found:
        return
    try:
        wanted = list(_requires(name, extras))
    except metadata.PackageNotFoundError:
        return
    found[name] = {other for other, _ in wanted}
    for other, more in wanted:
        _collect(other, more, found)


def main() -> None:
    """Print one `NAME==VERSION` a line."""
    found: dict[str, set[str]] = {}
    _collect("lmcache-cartridge", EXTRAS, found)
    needing = {"torch"}
    while more := {name for name, wanted in found.items() if wanted & needing} - needing:
        needing |= more
    print(*(f"{name}=={metadata.version(name)}" for name in sorted(found.keys() - needing)), sep="\n")


main()
