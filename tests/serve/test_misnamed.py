"""Fields by which somebody meant cartridges: what counts as one, wherever it stands, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_cartridge.serve import misnamed

READ = ("cartridges",)
WRONG = [
    "cartridge",
    "CARTRIDGES",
    "cartridgeId",
    "kv_cartridges",
    "cartrigdes",
    "catridge",
    "cart_ridges",
    "cartridges ",
    "cardridges",
]
PLACES = ["metadata", "extra_body.extra_body", "sampling_params.extra_args.kv_transfer_params"]
VLLM = ["cache_salt", "chat_template", "parallel_tool_calls", "char", "carriages_x"]


@pytest.mark.parametrize("name", WRONG)
def test_a_slip_is_found_in_the_bytes_and_in_the_fields(name):
    assert misnamed.find({"model": "m", name: ["a"]}, READ) == name
    assert misnamed.find({"model": "m", name: None}, READ) is None, "null is not given"
    assert misnamed.find({name: ["a"]}, (*READ, name)) is None, "what is read is no slip"


@pytest.mark.parametrize("place", PLACES)
def test_a_field_that_stands_in_another_object_is_found(place):
    fields: Any = {"cartridge": ["a"]}
    for part in reversed(place.split(".")):
        fields = {part: fields}
    assert misnamed.find(fields, READ) == f"{place}.cartridge"


def test_words_of_the_users_own_are_none_of_our_business():
    printer = {"type": "object", "properties": {"cartridges": {"type": "integer"}, "cartridge": {"type": "string"}}}
    fields = {
        "messages": [{"role": "user", "content": 'Which cartridges? {"cartridge": 1}'}],
        "tools": [{"type": "function", "function": {"name": "order_cartridges", "parameters": printer}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "cartridges", "schema": printer}},
        "metadata": {"topic": "cartridges", "printer_cartridge_type": "301"},
        "kv_transfer_params": {"cartridge_id": "a"},
        "cartridges": ["a"],
    }
    assert misnamed.find(dict.fromkeys(VLLM, "x") | fields, READ) is None


def test_a_name_without_end_costs_nothing():
    assert misnamed.find({"cartridge" * 100_000: 1}, READ) is None
