"""What a real spdk_tgt answered, read by our client: the outcome, the result's type and its keys."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from spdk_rpc import RpcMethodError, RpcUsageError, results, table
from spdk_rpc.call import Call, Shape, check_params
from spdk_rpc.framing import FramingError, JsonSplitter, decode_value
from spdk_rpc.generate import shape_of
from spdk_rpc.protocol import Exchange, result_of

RECORDED = Path(__file__).resolve().parents[2] / "data" / "spdk_recorded.jsonl"
CASES = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
# Values of a driver or of a transport have keys of their own; TypedDicts end there.
OPEN = {"driver_specific", "params"}


def requests_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests of a case that are whole and have an id; [] for what is malformed on purpose."""
    try:
        values = [
            decode_value(raw) for raw in JsonSplitter(size_limit_bytes=1 << 20).feed(case["request"].encode())
        ]
    except FramingError:
        return []
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [each for each in flat if isinstance(each, dict) and each.get("id") is not None]


class Waiting(Exchange):
    """An exchange that has sent a recorded request, with the recorded id."""

    def __init__(self, requests: list[dict[str, Any]], *, is_array: bool) -> None:
        super().__init__(iter([each["id"] for each in requests]), address="recorded")
        sent = [(str(each.get("method")), params_of(each)) for each in requests]
        if is_array:
            self.batch(sent)
        else:
            for method, params in sent:
                self.request(method, params)


def params_of(request: dict[str, Any]) -> dict[str, Any] | None:
    params = request.get("params")
    return params if isinstance(params, dict) else None


def usable(case: dict[str, Any]) -> bool:
    requests = requests_of(case)
    return bool(requests) and bool(case["response"]) and all(type(each["id"]) is int for each in requests)


def replies_of(case: dict[str, Any], size: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(request, reply) of a case whose reply arrives in pieces of that size."""
    requests = requests_of(case)
    exchange = Waiting(requests, is_array=case["request"].lstrip().startswith("["))
    raw = case["response"].encode()
    answered = [each for at in range(0, len(raw), size) for each in exchange.feed(raw[at : at + size])]
    assert exchange.dropped_reply_count == 0
    by_id = {each["id"]: each for each in requests}
    return [(by_id[request_id], reply) for request_id, reply in answered]


@pytest.mark.parametrize("case", [each for each in CASES if usable(each)], ids=lambda case: case["case"])
def test_real_answer_is_read(case: dict[str, Any]) -> None:
    pairs = replies_of(case, 1 << 20)
    assert pairs and pairs == replies_of(case, 7)
    for request, reply in pairs:
        if "error" in reply:
            with pytest.raises(RpcMethodError) as caught:
                result_of(str(request.get("method")), reply, request.get("params"))
            assert (caught.value.code, caught.value.message) == (
                reply["error"]["code"],
                reply["error"]["message"],
            )
            continue
        method = table.methods().get(request["method"])
        if method is None:
            assert request["method"] == "env_dpdk_get_mem_stats", (
                "a recorded method that the table does not have"
            )
            continue
        check_params(method.name, request.get("params") or {})
        call: Call[Any] = Call(method.name, request.get("params") or {}, Shape[shape_of(method.result)])
        result = call.result_of(result_of(method.name, reply, request.get("params")))
        unknown = set(unknown_keys(method.name, annotation_of(method.result), result))
        assert not unknown, f"keys that no result type has: {sorted(unknown)}"


def test_enough_real_answers_are_read() -> None:
    assert sum(map(usable, CASES)) > 170


def annotation_of(name: str) -> Any:
    return eval(name, {**vars(results), "Any": Any})


def unknown_keys(place: str, annotation: Any, value: Any) -> list[str]:
    """Places in a value that its type does not name."""
    arguments = typing.get_args(annotation)
    if isinstance(value, list):
        element = next((each for each in arguments if each is not type(None)), Any)
        if typing.get_origin(element) is list:
            element = typing.get_args(element)[0]
        return [found for each in value for found in unknown_keys(f"{place}[]", element, each)]
    if not isinstance(value, dict) or not typing.is_typeddict(annotation):
        return []
    hints = typing.get_type_hints(annotation)
    found: list[str] = []
    for key, each in value.items():
        if key not in hints:
            found.append(f"{place}.{key}")
        elif key not in OPEN:
            found += unknown_keys(f"{place}.{key}", hints[key], each)
    return found


def test_refused_parameters_of_recorded_cases_are_refused_before_they_are_sent() -> None:
    refused = []
    for case in filter(usable, CASES):
        for request in requests_of(case):
            is_decode_failure = re.search("decode_object failed|Invalid param", case["response"])
            if is_decode_failure and request.get("method") in table.methods():
                try:
                    check_params(request["method"], request.get("params") or {})
                except RpcUsageError:
                    refused.append(case["case"])
    assert len(refused) >= 4, refused
