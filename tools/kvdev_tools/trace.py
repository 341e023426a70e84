"""Request traces: a reader of the published format, and a generator of multi-turn conversations.

A record names, for each block of 512 prompt tokens, the hash of that block and all before it: equal ids mean an
equal prefix. Not here: replaying (``kvdev_tools.replay``).
Source: Mooncake (FAST'25) trace release: JSON lines of timestamp, input_length, output_length, hash_ids.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from kvdev.errors import UsageError
from kvdev.files import open_regular

TRACE_BLOCK_TOKENS = 512
HASH_ID_LIMIT = 1 << 64
# A prompt of 8 million tokens: far beyond any model's context, small enough to bound one line's memory.
BLOCKS_PER_REQUEST_LIMIT = 1 << 14
LINE_SIZE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Request:
    """One request: when it came, and the prefix blocks of its prompt."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(
            {
                "timestamp": self.timestamp_ms,
                "input_length": self.input_length,
                "output_length": self.output_length,
                "hash_ids": list(self.hash_ids),
            }
        )


def _field(record: dict[str, object], name: str, *, where: str, least: int) -> int:
    value = record.get(name)
    if name not in record:
        raise UsageError(
            f"{where}: {name}: missing; a record has timestamp, input_length, output_length, hash_ids"
        )
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < HASH_ID_LIMIT:
        raise UsageError(f"{where}: {name}: expected a whole number of at least {least}, got {value!r:.60}")
    return value


def parse_request(untrusted: str, *, where: str) -> Request:
    """One line of a trace; raises UsageError naming ``where``, the field, its value and what is expected."""
    if len(untrusted) > LINE_SIZE_LIMIT_BYTES:
        raise UsageError(
            f"{where}: line: expected at most {LINE_SIZE_LIMIT_BYTES} bytes, got {len(untrusted)}"
        )
    try:
        record = json.loads(untrusted)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: line: expected a JSON object, got {untrusted.strip()!r:.60} ({error})"
        ) from error
    if not isinstance(record, dict):
        raise UsageError(f"{where}: line: expected a JSON object, got {untrusted.strip()!r:.60}")
    timestamp_ms = _field(record, "timestamp", where=where, least=0)
    input_length = _field(record, "input_length", where=where, least=1)
    output_length = _field(record, "output_length", where=where, least=0)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise UsageError(f"{where}: hash_ids: expected a list of block hashes, got {ids!r:.60}")
    if len(ids) > BLOCKS_PER_REQUEST_LIMIT:
        raise UsageError(
            f"{where}: hash_ids: expected at most {BLOCKS_PER_REQUEST_LIMIT} blocks, got {len(ids)}"
        )
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < HASH_ID_LIMIT:
            raise UsageError(f"{where}: hash_ids[{index}]: expected a 64-bit whole number, got {value!r:.60}")
    if len(set(ids)) != len(ids):
        raise UsageError(
            f"{where}: hash_ids: a block hash covers its prefix, so none occurs twice in one request"
        )
    blocks = -(-input_length // TRACE_BLOCK_TOKENS)
    if blocks != len(ids):
        raise UsageError(
            f"{where}: hash_ids: expected {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens "
            f"for input_length {input_length}, got {len(ids)}"
        )
    return Request(timestamp_ms, input_length, output_length, tuple(ids))


def read_trace(path: Path, *, limit: int | None = None) -> Iterator[Request]:
    """Requests of a trace file in order, at most ``limit``; blank lines are skipped."""
    try:
        file = io.TextIOWrapper(open_regular(path), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"trace: cannot read {path}: {reason}; name another file, or copy it to one"
        ) from error
    with file:
        count = 0
        number = 0
        while limit is None or count < limit:
            number += 1
            try:
                line = file.readline(LINE_SIZE_LIMIT_BYTES + 2)
            except UnicodeDecodeError as error:
                raise UsageError(f"{path}:{number}: line: expected UTF-8 text ({error.reason})") from error
            except OSError as error:
                raise UsageError(f"trace: cannot read {path}:{number}: {error.strerror}") from error
            if not line:
                return
            if line.strip():
                count += 1
                yield parse_request(line, where=f"{path}:{number}")


@dataclass(frozen=True)
class ConversationModel:
    """What the generator draws from; the defaults give a hit rate like the published hour's with few requests.

    Lengths are in tokens, waits in milliseconds; each is the mean of a log-normal draw with ``sigma``.
    """

    system_prompt_count: int = 4
    system_prompt_tokens: int = 2048
    first_turn_tokens: int = 5000
    next_turn_tokens: int = 700
    answer_tokens: int = 350
    think_time_ms: float = 25_000.0
    arrival_ms: float = 4_000.0
    continue_probability: float = 0.55
    context_limit_tokens: int = 48 * TRACE_BLOCK_TOKENS
    sigma: float = 0.6


def generate_conversations(*, seed: int, model: ConversationModel | None = None) -> Iterator[Request]:
    """An endless, deterministic stream of requests of interleaved multi-turn conversations, by time of arrival.

    Each turn's prompt is the whole history so far; a block's id is new unless the same conversation, or another one
    with the same system prompt, already had that prefix. Only full blocks are shared, as in an engine: a partly
    filled last block gets another id once it has grown.
    """
    model = model or ConversationModel()
    rng = np.random.default_rng(seed)
    next_id = 0

    def draw(mean: float) -> int:
        # A log-normal with the given mean: exp(mu + sigma^2/2) = mean.
        return max(1, int(rng.lognormal(np.log(mean) - model.sigma**2 / 2, model.sigma)))

    system_blocks: list[list[int]] = []
    for _ in range(model.system_prompt_count):
        blocks = model.system_prompt_tokens // TRACE_BLOCK_TOKENS
        system_blocks.append(list(range(next_id, next_id + blocks)))
        next_id += blocks

    # (time of the next turn, tie breaker, full blocks so far, tokens so far)
    waiting: list[tuple[int, int, list[int], int]] = []
    arrival_ms = 0
    serial = 0
    while True:
        if not waiting or min(waiting)[0] > arrival_ms:
            shared = system_blocks[int(rng.integers(model.system_prompt_count))]
            tokens = len(shared) * TRACE_BLOCK_TOKENS + draw(model.first_turn_tokens)
            turn = (arrival_ms, serial, list(shared), min(tokens, model.context_limit_tokens))
            serial += 1
            arrival_ms += max(1, int(rng.exponential(model.arrival_ms)))
        else:
            turn = min(waiting)
            waiting.remove(turn)
        now_ms, _, full, tokens = turn
        while len(full) < tokens // TRACE_BLOCK_TOKENS:
            full.append(next_id)
            next_id += 1
        ids = list(full)
        if tokens % TRACE_BLOCK_TOKENS:
            ids.append(next_id)
            next_id += 1
        answer = draw(model.answer_tokens)
        yield Request(now_ms, tokens, answer, tuple(ids))
        grown = tokens + answer + draw(model.next_turn_tokens)
        if grown <= model.context_limit_tokens and rng.random() < model.continue_probability:
            pause_ms = max(1, int(rng.exponential(model.think_time_ms)))
            waiting.append((now_ms + pause_ms, serial, full, grown))
            serial += 1


def generate_trace(count: int, *, seed: int, model: ConversationModel | None = None) -> list[Request]:
    """The first ``count`` requests of ``generate_conversations``."""
    return list(islice(generate_conversations(seed=seed, model=model), count))


@dataclass(frozen=True)
class TraceSummary:
    """What a trace asks of a cache with room for everything."""

    requests: int
    pages_requested: int
    pages_restorable: int
    pages_distinct: int

    @property
    def hit_rate(self) -> float:
        """Pages restorable from stored prefixes, over pages requested; 0 for an empty trace."""
        return self.pages_restorable / self.pages_requested if self.pages_requested else 0.0


def summarise(requests: Iterable[Request]) -> TraceSummary:
    """Longest-prefix reuse with unlimited room, each request's pages stored before the next comes."""
    stored: set[int] = set()
    count = requested = restorable = 0
    for request in requests:
        count += 1
        requested += len(request.hash_ids)
        for hash_id in request.hash_ids:
            if hash_id not in stored:
                break
            restorable += 1
        stored.update(request.hash_ids)
    return TraceSummary(count, requested, restorable, len(stored))
