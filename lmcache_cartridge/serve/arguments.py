"""Arguments: what the options that `serve` passes on to vLLM say, read without vLLM, whose parser takes half a minute.

`--option value`, `--option=value`, underscores for dashes, short names, `--option.key value` for JSON and `--config
FILE` are read as vLLM 0.32 reads them; the command line holds over the file, and the last word over the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..engine import refusals
from ..errors import SettingsError, UnsupportedEngine

TRANSFER = "kv-transfer-config"
SECRETS = ("api-key", "hf-token", "watermark-config")
"""Options whose values vLLM prints as `***` too."""
_SHORT = {
    "pp": "pipeline-parallel-size", "tp": "tensor-parallel-size", "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size", "pcp": "prefill-context-parallel-size", "sc": "speculative-config",
}  # fmt: skip


class Option(NamedTuple):
    """One option as given; the words before the first option are those of one without a name."""

    name: str
    """In full, with dashes."""
    keys: Sequence[str]
    """Where in its JSON the value belongs, for `--option.key value`."""
    tokens: list[str]
    """All that it takes of the command line."""

    @property
    def value(self) -> str:
        """The first value; empty without one."""
        _, equals, value = self.tokens[0].partition("=")
        return value if equals else "".join(self.tokens[1:2])


def _parsed(tokens: Sequence[str]) -> list[Option]:
    options = [Option("", (), [])]
    for token in tokens:
        if token.startswith("-") and not token[1:2].isdecimal():
            name, *keys = token.lstrip("-").partition("=")[0].split(".")
            name = name.replace("_", "-") if token.startswith("--") else _SHORT.get(name, name)
            options.append(Option(name, keys, []))
        options[-1].tokens.append(token)
    return options


class Arguments:
    """The options of one vLLM command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises `SettingsError` for a `--config` file that cannot be read."""
        self._given = _parsed(arguments)
        files = [_from_file(option.value) for option in self._given if option.name == "config"]
        self._options = [option for given in (*map(_parsed, files), self._given) for option in given]

    def get(self, name: str) -> str | None:
        """Return an option's value: empty where it has none, None where it is not given."""
        found = (option.value for option in reversed(self._options) if option.name == name and not option.keys)
        return next(found, None)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the value of an option that is a JSON object, empty without it. Raises `SettingsError` for others."""
        text = self.get(name)
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            raise SettingsError(f"--{name}: {error}") from None
        if not isinstance(found, dict):
            raise SettingsError(f"--{name} must be a JSON object")
        for option in self._options:
            if option.name == name and option.keys:
                *path, last = option.keys
                inside = found
                for key in path:
                    if not isinstance(inside.get(key), dict):
                        inside[key] = {}
                    inside = inside[key]
                inside[last] = _value(option.value)
        return found

    def without(self, name: str) -> list[str]:
        """Return the arguments less one option."""
        return [token for option in self._given if option.name != name for token in option.tokens]

    def check(self, *, in_process: bool, saves: bool = False) -> None:
        """Raise `UnsupportedEngine`, with the reason, for what the connector refuses once a model is loaded."""
        if self.get("kv-offloading-size") is not None:
            raise UnsupportedEngine(
                "--kv-offloading-size puts another connector in the place of the one that serves cartridges; remove it"
            )
        is_given = {"speculative-config", "spec-model"} & {option.name for option in self._options}
        speculates = self.mapping("speculative-config")
        method = speculates.get("method") or self.get("spec-method")
        refusals.check(
            refusals.ENGINE,
            refusals.Facts(
                in_process=in_process,
                saves=saves,
                stages=self.number("pipeline-parallel-size"),
                engines=self.number("data-parallel-size"),
                split=max(self.number("prefill-context-parallel-size"), self.number("decode-context-parallel-size")),
                speculation=method or ("no method" if is_given else None),
                cache_dtype=self.get("kv-cache-dtype") or "auto",
                may_sleep=self.get("enable-sleep-mode") not in (None, "false", "False"),
                extra=self.mapping(TRANSFER).get("kv_connector_extra_config") or {},
            ),
        )

    def number(self, name: str, otherwise: int = 1) -> int:
        """Return the value of an option that is a number; `otherwise` without it."""
        text = self.get(name)
        return int(text) if text and text.isdecimal() else otherwise


def redacted(arguments: Sequence[str]) -> list[str]:
    """Return arguments as they may be shown: `***` for every value of an option in `SECRETS`."""
    shown: list[str] = []
    for option in _parsed(arguments):
        if option.name not in SECRETS:
            shown += option.tokens
            continue
        head, equals, _ = option.tokens[0].partition("=")
        shown += [f"{head}=***" if equals else head, *("***" for _ in option.tokens[1:])]
    return shown


def _from_file(file: str) -> list[str]:
    try:
        fields = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {file}: {error}") from None
    if not isinstance(fields, dict):
        raise SettingsError(f"--config {file} must have a name and a value on each line")
    tokens: list[str] = []
    for name, value in fields.items():
        if isinstance(value, list):
            tokens += [f"--{name}", *map(str, value)] if value else []
        elif not isinstance(value, bool):
            tokens.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        elif value:
            tokens.append(f"--{name}")
    return tokens


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
