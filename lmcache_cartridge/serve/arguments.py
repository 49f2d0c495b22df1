"""Arguments: what the options that `serve` passes on to vLLM say, read without vLLM, whose parser takes half a minute.

`--option value`, `--option=value`, underscores for dashes, short names, `--option.key value` for JSON and `--config
FILE` are read as vLLM 0.32 reads them; the command line holds over the file, and the last word over the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


class Arguments:
    """The options of one vLLM command line."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Raises `SettingsError` for a `--config` file that cannot be read."""
        self._tokens = list(arguments)
        self._values: dict[str, str | None] = {}
        self._nested: dict[str, dict[str, Any]] = {}
        given = _options(self._tokens)
        for file in (option.value for option in given if option.name == "config"):
            self._note(_options(_from_file(file)))
        self._note(given)

    def _note(self, options: list[_Option]) -> None:
        for option in options:
            name, *keys = option.name.split(".")
            if keys:
                inside = self._nested.setdefault(name, {})
                for key in keys[:-1]:
                    inside = inside.setdefault(key, {})
                inside[keys[-1]] = _value(option.value or "")
            else:
                self._values[name] = option.value

    def get(self, name: str) -> str | None:
        """Return an option's value: empty where it has none, None where it is not given."""
        value = self._values.get(name)
        return "" if value is None and name in self._values else value

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the value of an option that is a JSON object, empty without it. Raises `SettingsError` for others."""
        text = self.get(name)
        try:
            found = json.loads(text) if text else {}
        except ValueError as error:
            raise SettingsError(f"--{name}: {error}") from None
        if not isinstance(found, dict):
            raise SettingsError(f"--{name} must be a JSON object")
        return found | self._nested.get(name, {})

    def without(self, name: str) -> list[str]:
        """Return the arguments less one option."""
        groups = _grouped(self._tokens)
        return [
            token for option, tokens in groups if not option or option.name.split(".")[0] != name for token in tokens
        ]

    def check(self, *, in_process: bool, saves: bool = False, contexts: bool = False) -> None:
        """Raise `UnsupportedEngine`, with the reason, for what the connector refuses once a model is loaded, and for what does
        not go with `contexts`.
        """
        if self.get("kv-offloading-size") is not None:
            raise UnsupportedEngine(
                "--kv-offloading-size puts another connector in the place of the one that serves cartridges; remove it"
            )
        is_given = {"speculative-config", "spec-model"} & self._values.keys()
        speculates = self.mapping("speculative-config")
        method = speculates.get("method") or self.get("spec-method")
        refusals.check(
            refusals.ENGINE + refusals.CONTEXTS * contexts,
            refusals.Facts(
                in_process=in_process,
                saves=saves,
                stages=self.number("pipeline-parallel-size"),
                engines=self.number("data-parallel-size"),
                split=max(self.number("prefill-context-parallel-size"), self.number("decode-context-parallel-size")),
                speculation=method or ("no method" if is_given or speculates else None),
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
    for option, tokens in _grouped(arguments):
        if option is None or option.name.split(".")[0] not in SECRETS:
            shown += tokens
            continue
        head, equals, _ = tokens[0].partition("=")
        shown += [f"{head}=***" if equals else head, *("***" for _ in tokens[1:])]
    return shown


class _Option:
    """One option as given: its name in full, with dashes, and its values."""

    def __init__(self, token: str, values: Sequence[str]) -> None:
        name, equals, value = token.lstrip("-").partition("=")
        head, dot, keys = name.partition(".")
        head = head.replace("_", "-") if token.startswith("--") else _SHORT.get(head, head)
        self.name = head + dot + keys
        self.values = [value] if equals else list(values)
        self.value = self.values[0] if self.values else None


def _options(tokens: Sequence[str]) -> list[_Option]:
    return [option for option, _ in _grouped(tokens) if option is not None]


def _grouped(tokens: Sequence[str]) -> list[tuple[_Option | None, list[str]]]:
    """Return each option with the tokens that it and its values take; None beside those before the first."""
    groups: list[list[str]] = [[]]
    for token in tokens:
        if token.startswith("-") and not token[1:2].isdecimal():
            groups.append([])
        groups[-1].append(token)
    return [(_Option(group[0], group[1:]) if group[0].startswith("-") else None, group) for group in groups if group]


def _from_file(file: str | None) -> list[str]:
    try:
        fields = yaml.safe_load(Path(file or "").read_text()) or {}
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
