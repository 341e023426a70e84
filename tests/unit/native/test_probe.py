"""The probe engine: buckets and merging, offsets of every order, and jobs on memory, plain, striped and verified."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvdev.errors import UsageError
from kvdev.native.io import address_of
from kvdev.native.probe import (
    BUCKET_COUNT,
    LOG_DTYPE,
    RESULT_DTYPE,
    BadReason,
    EndReason,
    Probe,
    ProbeMember,
    Verdict,
    add_sample,
    bucket_of,
    bucket_value,
    merge_lat,
    new_lat,
    struct_sizes,
)

MIB = 1 << 20
LONG_NS = 60_000_000_000


class Rig:
    """A job on memory, its payload and its devices."""

    def __init__(
        self, *, size: int = MIB, members: int = 1, strip: int = 0, transfer: int = MIB, **params: Any
    ) -> None:
        depth = params.get("depth", 8)
        high = max(params.get("high", params.get("low", 4096)), 4096)
        self.buffers = np.zeros(depth * high + 4096, dtype=np.uint8)
        self.memories = [np.zeros(size // members, dtype=np.uint8) for _ in range(members)]
        low = params.pop("low", 4096)
        block = {
            "low": low,
            "high": params.pop("high", low),
            "align": params.pop("align", low),
            "percent_random": params.pop("percent_random", 100),
            "split_count": len(params.get("splits", ())),
            "split_size": [each for each, _ in params.get("splits", ())],
            "split_percent": [each for _, each in params.pop("splits", ())],
        }
        fields = {
            "size": size,
            "io_size": size,
            "loops": 1,
            "seed": 5,
            "generation": 77,
            "sequence_count": 1,
            "buffer_addr": address_of(self.buffers),
            "buffer_stride": high,
            "sample_bw_ns": 500_000_000,
            "sample_iops_ns": 500_000_000,
            "block_size_bytes": 512,
            "strip_size_bytes": strip,
            "member_count": members,
            "depth": depth,
            "batch_submit": 1,
            "batch_complete_min": 1,
            "batch_complete_max": 1,
            "depth_low": depth,
            "read_percent": 50,
            "has": [1, 0, 0],
            "has_slat": 1,
            "has_clat": 1,
            "has_lat": 1,
            "distribution_center": -1.0,
            "latency_percentile": 100.0,
            "verify_interval": low,
            "blocks": [block, block, block],
        }
        fields.update(params)
        devices = [
            ProbeMember(len(memory), transfer, memory_addr=address_of(memory)) for memory in self.memories
        ]
        self.probe = Probe(fields, devices, queue=None)

    def run(self) -> Any:
        assert self.probe.run(LONG_NS) is Verdict.DONE
        return self.probe.result()[0]

    def offsets(self, count: int) -> npt.NDArray[np.uint64]:
        return self.probe.preview(count)[0]


def test_structs_when_mirrored_then_the_sizes_are_the_cores() -> None:
    assert struct_sizes() == (RESULT_DTYPE.itemsize, LOG_DTYPE.itemsize)


def test_buckets_when_walked_then_each_value_lies_within_a_64th_of_its_bucket() -> None:
    last = -1
    for value in [
        *range(5000),
        *(1 << shift for shift in range(13, 33)),
        *((1 << shift) - 1 for shift in range(13, 34)),
    ]:
        bucket = bucket_of(value)
        assert abs(bucket_value(bucket) - value) <= value / 64
        if value < 5000:
            assert bucket >= last
            last = bucket
    assert bucket_of(127) == 127 and bucket_of(128) == bucket_of(129) == 128
    assert bucket_of((1 << 64) - 1) == BUCKET_COUNT - 1


def test_histograms_when_merged_then_they_are_as_one_that_took_all_samples() -> None:
    values = np.random.default_rng(3).integers(0, 1 << 30, 4000)
    whole, parts = new_lat(), [new_lat() for _ in range(4)]
    for index, value in enumerate(values.tolist()):
        add_sample(whole, value)
        add_sample(parts[index % 3], value)  # the fourth stays empty
    merged = new_lat()
    for part in parts:
        merge_lat(merged, part)
    assert np.array_equal(merged["buckets"], whole["buckets"])
    assert all(merged["stat"][name] == whole["stat"][name] for name in ("count", "min", "max"))
    assert merged["stat"]["mean"][0] == pytest.approx(values.mean())
    assert merged["stat"]["square"][0] / 3999 == pytest.approx(values.var(ddof=1))


def test_random_with_map_when_run_through_then_every_block_comes_once() -> None:
    offsets = Rig(is_random=1, has_map=1).offsets(1000)
    assert sorted(offsets.tolist()) == list(range(0, MIB, 4096))
    assert offsets.tolist() != sorted(offsets.tolist())


def test_random_with_map_when_blocks_differ_in_size_then_no_byte_comes_twice() -> None:
    rig = Rig(is_random=1, has_map=1, low=4096, high=32768, size=4 * MIB, io_size=4 * MIB)
    offsets, lengths, _ = rig.probe.preview(10000)
    seen = np.zeros(4 * MIB // 4096, dtype=int)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        seen[offset // 4096 : (offset + length) // 4096] += 1
    assert (seen == 1).all()


def test_random_without_map_when_long_then_blocks_are_evenly_spread() -> None:
    count = 64_000
    offsets = Rig(is_random=1, io_size=count * 4096).offsets(count)
    counts = np.bincount((offsets // 4096).astype(int), minlength=256)
    expected = count / 256
    assert ((counts - expected) ** 2 / expected).sum() < 350  # chi-square of 255 degrees: p < 1e-4


def test_sequential_when_mixed_then_each_direction_has_its_own_place() -> None:
    offsets, _, ways = Rig(has=[1, 1, 0]).probe.preview(1000)
    assert len(offsets) == 256
    for way in (0, 1):
        mine = offsets[ways == way]
        assert np.array_equal(mine, np.arange(len(mine)) * 4096)


def test_mix_when_70_to_30_then_shares_are_near_it() -> None:
    _, _, ways = Rig(has=[1, 1, 0], is_random=1, read_percent=70, io_size=40_000 * 4096).probe.preview(40_000)
    assert (ways == 0).mean() == pytest.approx(0.7, abs=0.01)


def test_split_sizes_when_drawn_then_shares_are_near_their_percentages() -> None:
    splits = ((4096, 50), (8192, 30), (65536, 20))
    rig = Rig(low=4096, high=65536, splits=splits, is_random=1, size=64 * MIB, io_size=1 << 34, align=4096)
    _, lengths, _ = rig.probe.preview(20_000)
    counts = Counter(lengths.tolist())
    for size, percent in splits:
        assert counts[size] / 20_000 == pytest.approx(percent / 100, abs=0.015)


def test_sequence_when_eight_per_offset_then_seven_follow_each_jump() -> None:
    offsets = (
        Rig(is_random=1, sequence_count=8, io_size=100 * MIB, size=16 * MIB).offsets(800).astype(np.int64)
    )
    follows = np.diff(offsets) == 4096
    assert all(follows[index] for index in range(799) if index % 8 != 7)
    assert follows[7::8].mean() < 0.1


def test_percent_random_when_half_then_about_half_follow() -> None:
    offsets = (
        Rig(is_random=1, percent_random=50, io_size=100 * MIB, size=16 * MIB).offsets(8000).astype(np.int64)
    )
    assert (np.diff(offsets) == 4096).mean() == pytest.approx(0.5, abs=0.03)


def test_backwards_when_asked_for_then_it_runs_from_the_end() -> None:
    offsets = Rig(sequence_add=-4096).offsets(1000)
    assert offsets.tolist() == list(range(MIB - 4096, -1, -4096))


def test_loops_when_three_then_the_region_is_passed_three_times() -> None:
    assert len(Rig(loops=3).offsets(10_000)) == 768
    assert len(Rig(io_size=3 * MIB, is_random=1, has_map=1).offsets(10_000)) == 768


def test_same_seed_when_started_again_then_the_sequence_is_the_same() -> None:
    first = Rig(is_random=1, seed=9).offsets(256)
    assert np.array_equal(first, Rig(is_random=1, seed=9).offsets(256))
    assert not np.array_equal(first, Rig(is_random=1, seed=10).offsets(256))


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_job_when_run_then_every_io_is_counted_in_every_statistic(depth: int) -> None:
    result = Rig(is_random=1, has_map=1, depth=depth).run()
    assert result["ios"].tolist() == [256, 0, 0] and result["bytes"].tolist() == [MIB, 0, 0]
    for name in ("slat", "clat", "lat"):
        assert result[name][0]["stat"]["count"] == result[name][0]["buckets"].sum() == 256
    assert result["clat_ns"].sum() + result["clat_us"].sum() + result["clat_ms"].sum() == 256
    assert result["depth_map"].sum() == result["submit_map"].sum() == 256
    assert result["end_reason"] == EndReason.COMPLETE and result["in_flight"] == 0


def test_stripe_when_written_then_each_member_has_its_strips() -> None:
    rig = Rig(
        members=4,
        strip=16384,
        has=[0, 1, 0],
        low=65536,
        verify=1,
        does_verify=1,
        transfer=8192,
        verify_interval=4096,
    )
    result = rig.run()
    assert result["bad_count"] == 0 and result["ios"].tolist() == [16, 16, 0]
    whole = np.stack([memory.reshape(-1, 16384) for memory in rig.memories], axis=1).reshape(-1)
    again = Rig(verify=1, is_verify_only=1, low=65536, has=[0, 1, 0], does_verify=1, verify_interval=4096)
    again.memories[0][:] = whole
    assert again.run()["bad_count"] == 0


@pytest.mark.parametrize(
    ("at", "reason", "found"),
    [
        (5, BadReason.HEADER, 0),
        (8, BadReason.HEADER, 0),
        (39, BadReason.HEADER, 0),
        (40, BadReason.PAYLOAD, 40),
        (2000, BadReason.PAYLOAD, 2000),
        (4095, BadReason.PAYLOAD, 4095),
    ],
)
def test_verify_when_a_bit_is_flipped_then_the_byte_is_named(at: int, reason: BadReason, found: int) -> None:
    writer = Rig(has=[0, 1, 0], verify=1)
    writer.run()
    reader = Rig(has=[0, 1, 0], verify=1, is_verify_only=1, does_verify=1)
    reader.memories[0][:] = writer.memories[0]
    reader.memories[0][40 * 4096 + at] ^= 4
    result = reader.run()
    assert result["bad_count"] == 1 and result["bad_reason"] == reason
    assert result["bad_interval"] == 40 * 4096 and result["bad_offset"] == 40 * 4096 + found
    assert result["first_error"] == 84


def test_verify_when_a_block_of_elsewhere_lies_there_then_it_is_out_of_place() -> None:
    writer = Rig(has=[0, 1, 0], verify=1)
    writer.run()
    reader = Rig(has=[1, 0, 0], verify=1)
    reader.memories[0][:] = writer.memories[0]
    reader.memories[0][4096:8192] = writer.memories[0][8192:12288]
    result = reader.run()
    assert (result["bad_count"], result["bad_reason"], result["bad_offset"]) == (1, BadReason.PLACE, 4096)


def test_verify_pattern_when_a_byte_differs_then_it_is_named() -> None:
    pattern: dict[str, Any] = {"verify": 2, "pattern": b"\xde\xad\xbe", "pattern_size": 3}
    writer = Rig(has=[0, 1, 0], **pattern)
    writer.run()
    reader = Rig(**pattern)
    reader.memories[0][:] = writer.memories[0]
    reader.memories[0][70_001] ^= 1
    result = reader.run()
    assert (result["bad_count"], result["bad_offset"]) == (1, 70_001)


def test_verify_fatal_when_the_first_is_bad_then_the_job_ends() -> None:
    for fatal, least in ((0, 256), (1, 1)):
        reader = Rig(has=[1, 0, 0], verify=1, is_verify_fatal=fatal, depth=1)
        result = reader.run()  # nothing was written: every header is missing
        assert result["bad_count"] == least
        assert (result["end_reason"] == EndReason.ERROR) == bool(fatal)


def test_flushes_when_every_sixteenth_write_then_they_are_counted_apart() -> None:
    result = Rig(has=[0, 1, 0], sync_every=16, end_sync=1).run()
    assert result["ios"].tolist() == [0, 256, 0]
    assert result["sync"]["stat"]["count"] == 15


def test_stop_when_called_before_the_start_then_nothing_is_done() -> None:
    rig = Rig(start_ns=(1 << 63))
    rig.probe.stop()
    result = rig.run()
    assert result["ios"].sum() == 0 and result["end_reason"] == EndReason.STOPPED


def test_log_when_it_is_full_then_run_says_so_and_nothing_is_lost() -> None:
    rig = Rig(log_capacity=64, is_random=1, has_map=1)
    entries = []
    while (verdict := rig.probe.run(LONG_NS)) is not Verdict.DONE:
        assert verdict is Verdict.LOG_FULL
        entries.append(rig.probe.take_log())
    entries.append(rig.probe.take_log())
    offsets = np.concatenate(entries)["offset"]
    assert sorted(offsets.tolist()) == list(range(0, MIB, 4096))


def test_rate_when_set_then_the_last_io_is_not_early() -> None:
    rig = Rig(rate_iops=[2000, 0, 0], number_ios=100)
    result = rig.run()
    # The last of 100 may go out 99/2000 s after the first; how much later it does is the machine's.
    assert result["ios"][0] == 100
    assert int(result["ended_ns"]) - int(result["began_ns"]) >= 99 * 500_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0},
        {"low": 1000, "align": 1000},
        {"size": 2048},
        {"has": [0, 0, 0]},
        {"log_capacity": 4},
        {"loops": 0},
    ],
)
def test_parameters_when_they_contradict_each_other_then_the_core_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="probe: block sizes"):
        Rig(**wrong)
