"""What is saved elsewhere, and blocks some of which are run again: traced, found by the memory, and by the disk."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.backends.base import Job
from shardlab.backends.ddp import DDPBackend
from shardlab.errors import UserError
from shardlab.plan import Offload, Plan, Precision, Recompute, Timeline
from shardlab.planner import show
from shardlab.planner.choose import choose
from shardlab.planner.fewest import fewest_recomputed
from shardlab.planner.handover import chosen as chosen_for_others
from shardlab.planner.machine import GIB, Machine
from shardlab.planner.mixed import mixed
from shardlab.planner.names import name, settings
from shardlab.planner.predict import Predictor
from shardlab.planner.resolve import resolve
from shardlab.planner.search import Candidate, Survey, predictor, row_shapes, survey
from shardlab.planner.streaming import fitted
from shardlab.planner.trace import Tracer
from shardlab.recipe import AdamW, Recipe
from shardlab.train.tune import with_plan
from tests.planner import test_trace
from tests.planner.test_cost import RATES
from tests.planner.test_stream_cost import CONFIG, machine_of
from tests.planner.test_trace import GPT2, LLAMA, allocated, highest, trainable

MIB = 2**20
BATCH = row_shapes(4, 256, packed=True)
PLAN = Plan("ddp", 1, 4, 1, 4, "fp32")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(monkeypatch: pytest.MonkeyPatch, directory: Path, count: int | None, offload: Offload) -> None:
    """Let `allocated` measure a step that runs `count` blocks again and keeps what blocks save as `offload` says."""

    class Backend(DDPBackend):
        def prepare(self, job: Job, weights: Any) -> None:
            if count is not None:
                job.module.set_recompute("full", count)
            super().prepare(replace(job, plan=replace(job.plan, offload=offload), directory=directory), weights)

    monkeypatch.setattr(test_trace, "DDPBackend", Backend)


@pytest.mark.parametrize(
    ("config", "recompute", "precision"),
    [(LLAMA, "none", "fp32"), (LLAMA, "selective", "bf16"), (LLAMA, "full", "fp32"), (GPT2, "none", "bf16")],
)
def test_a_step_that_saves_to_the_disk_allocates_what_is_traced(
    config: dict[str, Any],
    recompute: Recompute,
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    tracer = Tracer(trainable(config))
    found = tracer.timeline(BATCH, precision, "buffers", recompute, away=True)
    prepared(monkeypatch, tmp_path, None, Offload(activations="disk"))
    assert highest(found) == pytest.approx(allocated(trainable(config, recompute), BATCH, precision), rel=0.01)
    assert highest(found) < highest(tracer.timeline(BATCH, precision, "buffers", recompute))


def test_what_blocks_save_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's hidden state alone with full recompute; the same of three blocks that stand for seven."""
    deep = {**LLAMA, "num_hidden_layers": 7}
    full = Tracer(trainable(deep)).timeline(BATCH, "fp32", "buffers", "full", away=True)
    hidden = 4 * 256 * 128 * 4
    assert [span.away for span in full if span.phase == "forward"] == [0, *[hidden] * 7, 0]
    short = Tracer(trainable(deep)).timeline(BATCH, "fp32", "buffers", "none", away=True)
    monkeypatch.setattr("shardlab.planner.trace._repeats", lambda module: False)
    whole = Tracer(trainable(deep)).timeline(BATCH, "fp32", "buffers", "none", away=True)
    assert [span.away for span in short] == [span.away for span in whole]
    assert short[1].away > 5 * hidden


def part(count: int) -> Timeline:
    tracer = Tracer(trainable(LLAMA))
    full, none = (tracer.timeline(BATCH, "fp32", "buffers", policy) for policy in ("full", "none"))  # type: ignore[arg-type]
    return mixed(full, none, count)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_runs_some_blocks_again_is_between(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared(monkeypatch, tmp_path, count, Offload())
    assert highest(part(count)) == pytest.approx(allocated(trainable(LLAMA), BATCH, "fp32"), rel=0.01)


def test_none_and_all_are_the_ends() -> None:
    tracer = Tracer(trainable(LLAMA))
    full, none = (tracer.timeline(BATCH, "fp32", "buffers", policy) for policy in ("full", "none"))  # type: ignore[arg-type]
    peaks = [highest(mixed(full, none, count)) for count in range(5)]
    assert peaks[0] == highest(none)
    assert peaks[4] == highest(full)
    assert peaks == sorted(peaks, reverse=True)


def machine(memory: int) -> Machine:
    return Machine("test", 1, False, memory, memory, 1, None)


def predict_llama() -> Predictor:
    return Predictor(
        trainable({**LLAMA, "num_hidden_layers": 12}), lambda rows: row_shapes(rows, 256, packed=True), AdamW()
    )


def test_as_few_blocks_are_run_again_as_fit() -> None:
    predict, plan = predict_llama(), replace(PLAN, recompute="full", recompute_fits=True)

    def needs(one: Plan) -> int:
        found = predict.footprint(one)
        return found.highest + found.libraries

    least, most = needs(plan), needs(replace(plan, recompute="none"))
    assert fewest_recomputed(plan, predict, machine(most)).recompute == "none"
    middle = machine((least + most) // 2)
    found = fewest_recomputed(plan, predict, middle)
    assert found.recompute_blocks is not None
    assert 0 < found.recompute_blocks < 12
    assert needs(found) <= middle.memory_bytes
    assert needs(replace(found, recompute_blocks=found.recompute_blocks - 1)) > middle.memory_bytes
    assert f"recompute full of {found.recompute_blocks} blocks" in name(found)
    assert "--set shard.recompute=auto" in settings(found)
    limited = fewest_recomputed(replace(plan, memory_limit=middle.memory_bytes), predict, machine(64 * GIB))
    assert limited.recompute_blocks == found.recompute_blocks
    with pytest.raises(UserError, match="with every block run again this plan still needs"):
        fewest_recomputed(plan, predict, machine(least - MIB))
    with pytest.raises(UserError, match=r"shard\.memory_limit is .* GiB, and test has"):
        fewest_recomputed(replace(plan, memory_limit=2 * GIB), predict, machine(GIB))


def test_saving_to_the_disk_takes_buffers_and_disk_and_no_more_memory_for_more_blocks() -> None:
    predict, offload = predict_llama(), Offload(activations="disk")
    kept, away = predict.footprint(PLAN), predict.footprint(replace(PLAN, offload=offload))
    assert away.tensors < kept.tensors - 5 * 4 * 256 * 128 * 4 * 12
    assert away.disk is not None
    assert away.disk.written == away.disk.read == away.disk.bytes > 12 * 5 * 4 * 256 * 128 * 4
    twice = predict.footprint(replace(PLAN, offload=offload, accumulation=2, global_batch_size=8)).disk
    assert twice is not None
    assert (twice.bytes, twice.written) == (away.disk.bytes, 2 * away.disk.written)


def test_a_survey_offers_what_pays_between_none_and_all_blocks_run_again(tmp_path: Path) -> None:
    """Fewer blocks; and, where the disk's speed is known and enough, what blocks save on the disk."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 12}))
    asked = Recipe.from_dict(
        {
            "model": {"config": str(tmp_path / "config.json")},
            "data": {"sequence_length": 256, "tokenizer": "bytes"},
            "train": {"global_batch_size": 4, "precision": "fp32"},
        }
    )
    predict = predictor(asked, machine(GIB))
    ends = [
        one.footprint.highest + one.footprint.libraries
        for one in survey(asked, machine(64 * GIB), predict=predict).candidates
        if one.plan.micro_batch == 4 and one.plan.recompute != "selective"
    ]
    assert len(ends) == 2, "with room for all there is nothing between"
    middle = machine(sum(ends) // 2)

    def between(on: Machine) -> tuple[Survey, list[Candidate]]:
        found = survey(asked, on, predict=predict)
        return found, [c for c in found.candidates if c.plan.recompute_fits or c.plan.offload.activations == "disk"]

    found, offered = between(middle)
    assert offered
    for one in offered:
        count = one.plan.recompute_blocks
        assert count is not None
        assert one.fits
        assert 0 < count < 12, "all would be no other plan"
        assert one.plan.offload.activations == "none", "the disk may be too slow for it"
    assert f"full of {offered[0].plan.recompute_blocks} blocks" in show.text(found)

    rates = replace(RATES, overlaps=False)
    found, offered = between(replace(middle, rates=replace(rates, disk=1e15)))
    away = [one for one in offered if one.plan.offload.activations == "disk"]
    assert away
    for one in away:
        whole = next(
            c for c in found.candidates
            if (c.plan.micro_batch, c.plan.recompute) == (one.plan.micro_batch, "full") and not c.plan.recompute_fits
        )  # fmt: skip
        assert one.plan.recompute == "none"
        assert one.fits
        assert one.cost is not None
        assert whole.cost is not None
        assert one.cost.seconds < whole.cost.seconds
    assert chosen_for_others(found).plan.offload == Offload()
    ruled = resolve(asked, world_size=1)
    assert choose(found, ruled).offload == Offload(), "a recipe that says none gets none"
    _, offered = between(replace(middle, rates=replace(rates, disk=1e3)))
    assert all(one.plan.offload.activations == "none" for one in offered)
    tried = with_plan(asked, away[0].plan)
    assert tried.shard.offload.activations == "disk"


def streamed(directory: Path, **offload: Any) -> Plan:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 8}))
    recipe = Recipe.from_dict(
        {
            "model": {"config": str(directory / "config.json")},
            "data": {"sequence_length": 64, "tokenizer": "bytes"},
            "train": {"global_batch_size": 4, "precision": "fp32"},
            "shard": {"backend": "stream", "micro_batch": 1, "offload": {"activations": "disk", **offload}},
        }
    )
    streamed.predict = predictor(recipe, machine_of(None))  # type: ignore[attr-defined]
    return resolve(recipe, world_size=1)


def test_stream_spills_as_many_blocks_as_pay_and_as_the_disk_has_room_for(tmp_path: Path) -> None:
    plan = streamed(tmp_path)
    predict: Predictor = streamed.predict  # type: ignore[attr-defined]

    def again(disk: float | None, limit: int | None = None) -> int | None:
        of = replace(plan, offload=replace(plan.offload, disk_limit=limit))
        return fitted(of, predict, machine_of(disk)).recompute_blocks

    assert again(1e15) == 1, "a disk that takes no time pays for all but the first"
    assert again(1e6) == 8, "one that is slower than computing pays for none"
    assert again(None) == 1, "nothing is known of the disk: all that fit"
    each = predict.away_bytes(replace(plan, recompute_blocks=7))
    assert again(1e15, 3 * each) == 5
    assert again(1e15, each - 1) == 8
    seconds = [
        cost.seconds
        for count in range(1, 9)
        if (cost := predict.cost(replace(plan, recompute_blocks=count), machine_of(2e9))) is not None
    ]
    chosen = again(2e9)
    assert chosen is not None
    assert seconds[chosen - 1] == min(seconds)


def test_what_is_spilled_is_in_streams_disk_and_traffic(tmp_path: Path) -> None:
    plan = streamed(tmp_path)
    predict: Predictor = streamed.predict  # type: ignore[attr-defined]
    none, some = (predict.footprint(replace(plan, recompute_blocks=count)).disk for count in (8, 5))
    each = predict.away_bytes(replace(plan, recompute_blocks=7))
    assert none is not None
    assert some is not None
    for what in ("bytes", "read", "written"):
        assert getattr(some, what) - getattr(none, what) == 3 * each


def test_the_disk_shows_where_the_passes_are_too_short_for_it() -> None:
    predict, offload = predict_llama(), Offload(activations="disk")
    rates = replace(RATES, overlaps=False)
    slow, quick = (
        predict.cost(replace(PLAN, offload=offload), replace(machine(GIB), rates=replace(rates, disk=disk)))
        for disk in (1e6, 1e15)
    )
    assert slow is not None
    assert quick is not None
    moved = predict.away_bytes(replace(PLAN, offload=offload))
    assert quick.parts["disk"] == 0
    assert slow.parts["disk"] == pytest.approx(2 * moved / 1e6 - quick.parts["forward"] - quick.parts["backward"])
    plain = predict.cost(PLAN, replace(machine(GIB), rates=rates))
    assert plain is not None
    assert quick.parts["copies"] - plain.parts["copies"] == pytest.approx(2 * moved / rates.stream)
