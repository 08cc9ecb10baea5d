"""Seconds of a step by arithmetic: against sums done by hand, against formulas of the field, against published runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from shardlab.backends.placement import Setting
from shardlab.backends.traffic import Exchange, exchanges, moves
from shardlab.model.trainable import make_trainable
from shardlab.plan import BackendName, Offload, Plan, Recompute, Span, Work
from shardlab.planner.calibration import rates as rates_of
from shardlab.planner.cost import Cost, cost, exchange_seconds
from shardlab.planner.machine import GIB, Machine, parse_hardware
from shardlab.planner.rates import Rates, tabled
from shardlab.planner.search import predictor, row_shapes
from shardlab.planner.trace import Tracer
from shardlab.recipe import Recipe
from tests.planner.test_footprint import SHAPE, TOTAL

PLAN = Plan("ddp", 8, 1, 1, 8, "fp32")
RATES = Rates(
    source="made up",
    products={"fp32": 1e12},
    attention={"fp32": 5e11},
    memory=1e11,
    stream=1e11,
    link=dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter"), 8e9),
    network=1e8,
    host_link=1e9,
    host_memory=1e10,
    operation=1e-6,
    hop=0.0,
    network_hop=0.0,
    overlaps=True,
    error=0.3,
)
MACHINE = Machine("test", 8, True, 64 * GIB, 64 * GIB, 1, RATES)
PASSES = (
    Span("forward", 0, {}, {}, {}, Work(products=1e12, attention=5e11, moved=1e11)),
    Span("backward", 0, {}, {}, {}, Work(products=2e12)),
)


def setting(backend: BackendName = "ddp", **changes: Any) -> Setting:
    return Setting(SHAPE, replace(PLAN, backend=backend, **changes), 2, PASSES, accelerator=True)


def costs(of: Setting, machine: Machine = MACHINE) -> Cost:
    found = cost(of, machine, tokens=1000)
    assert found is not None
    return found


def test_a_pass_takes_its_products_its_attention_and_its_bytes() -> None:
    found = costs(setting(accumulation=3))
    assert found.parts["forward"] == pytest.approx(3 * (1 + 1 + 1))
    assert found.parts["backward"] == pytest.approx(3 * 2)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(1000 / found.seconds)


def test_a_model_reaches_less_than_its_parts() -> None:
    """Its passes do; the update, which is measured whole, and collectives stay."""
    half = replace(RATES, reached={"fp32": {1: 0.5}})
    whole, slower = costs(setting()), costs(setting(), replace(MACHINE, rates=half))
    assert slower.parts["forward"] == pytest.approx(2 * whole.parts["forward"])
    assert slower.parts["backward"] == pytest.approx(2 * whole.parts["backward"])
    assert slower.parts["update"] == whole.parts["update"]
    assert costs(setting(), replace(MACHINE, rates=replace(RATES, reached={"bf16": {1: 0.5}}))) == whole


def test_more_tokens_at_once_reach_more() -> None:
    """Between two measured sizes by the logarithm; beyond them nothing is made up."""
    rates = replace(RATES, reached={"fp32": {256: 0.4, 1024: 0.8}})
    shares = [rates.share("fp32", tokens) for tokens in (64, 256, 512, 1024, 8192)]
    assert shares == pytest.approx([0.4, 0.4, 0.6, 0.8, 0.8])


def test_starting_operators_hides_behind_a_device_and_adds_up_on_a_cpu() -> None:
    many = (Span("forward", 0, {}, {}, {}, Work(products=1e12, operations=2e6)),)
    device, cpu = RATES, replace(RATES, overlaps=False)
    of = replace(setting(world_size=1), timeline=many)
    assert costs(of, replace(MACHINE, rates=device)).parts["forward"] == pytest.approx(2)
    assert costs(of, replace(MACHINE, rates=cpu)).parts["forward"] == pytest.approx(3)


def test_a_ring_sends_all_but_its_own_share_and_an_all_reduce_twice() -> None:
    gather = Exchange("all-gather", 8_000_000_000, 1, "nothing", 1, 8)
    assert exchange_seconds(gather, MACHINE, RATES) == pytest.approx(7 / 8)
    assert exchange_seconds(replace(gather, collective="all-reduce"), MACHINE, RATES) == pytest.approx(2 * 7 / 8)
    waiting = replace(RATES, hop=1.0)
    assert exchange_seconds(replace(gather, size=0, calls=3), MACHINE, waiting) == pytest.approx(3 * 7)


def test_a_ring_over_several_nodes_goes_at_the_rate_of_its_slowest_link() -> None:
    two = replace(MACHINE, ranks=16, nodes=2)  # a node's eight devices have 0.8 GB/s together
    gather = Exchange("all-gather", 800_000_000, 1, "nothing", 1, 16)
    assert exchange_seconds(gather, two, RATES) == pytest.approx(15 / 16)
    inside = replace(gather, ranks=8)
    assert exchange_seconds(inside, two, RATES) == pytest.approx(0.1 * 7 / 8)
    replicas = Exchange("all-reduce", 100_000_000, 1, "nothing", 1, 2, stride=8)  # eight rings share the network
    assert exchange_seconds(replicas, two, RATES) == pytest.approx(2 * 1 / 2)
    assert exchange_seconds(gather, two, replace(RATES, network=None)) is None


def test_replicas_keep_the_gathers_inside_a_node() -> None:
    machine = replace(MACHINE, ranks=16, nodes=2, rates=replace(RATES, network=1e6))
    whole, split = (costs(setting("fsdp", world_size=16, replicas=n), machine) for n in (1, 2))
    assert split.parts["communication"] < whole.parts["communication"] / 2


def test_weights_that_stay_gathered_are_gathered_once() -> None:
    kept, given_back = (setting("fsdp", reshard_after_forward=given) for given in (False, True))
    gathers = [[e.behind for e in exchanges(of) if e.collective == "all-gather"] for of in (kept, given_back)]
    assert gathers == [["forward"], ["forward", "backward"]]
    assert costs(kept).parts["communication"] <= costs(given_back).parts["communication"]


def test_what_fits_behind_a_pass_costs_one_call_and_what_does_not_the_rest() -> None:
    """A network on which the gradients take far longer than the last backward pass."""
    one, sent = 2.0, 2 * 7 / 8 * TOTAL * 4
    quick = costs(setting())
    assert quick.parts["communication"] == pytest.approx(sent / 8e9)  # one bucket, which nothing hides
    slow = replace(RATES, link=dict.fromkeys(RATES.link, 1e6))
    assert costs(setting(), replace(MACHINE, rates=slow)).parts["communication"] == pytest.approx(sent / 1e6)
    on_cpu = replace(slow, overlaps=False)
    assert costs(setting(), replace(MACHINE, rates=on_cpu)).parts["communication"] == pytest.approx(sent / 1e6)
    assert one < sent / 1e6


@pytest.mark.parametrize("backend", ["zero2", "fsdp", "zero3"])
def test_gradients_reduced_after_each_micro_batch_are_sent_as_often(backend: BackendName) -> None:
    def reduced(accumulation: int) -> int:
        kinds = ("all-reduce", "reduce-scatter")
        return sum(e.size for e in exchanges(setting(backend, accumulation=accumulation)) if e.collective in kinds)

    assert reduced(4) == 4 * reduced(1)
    assert sum(e.size for e in exchanges(setting("zero1", accumulation=4))) == sum(
        e.size for e in exchanges(setting("zero1"))
    )


def test_a_block_that_is_not_resharded_is_gathered_once() -> None:
    def gathered(*, reshard: bool) -> int:
        found = exchanges(setting("fsdp", reshard_after_forward=reshard))
        return sum(e.size for e in found if e.collective == "all-gather")

    assert gathered(reshard=True) - gathered(reshard=False) == 2 * 1_000_000 * 4


def test_the_update_is_of_the_ranks_part_and_offloaded_state_is_the_hosts() -> None:
    assert moves(setting("fsdp")).update == moves(setting("ddp")).update // 8
    moved = moves(setting("zero2", offload=Offload(optimizer="cpu"), accumulation=2))
    part = TOTAL // 8
    assert moved.host == part * 4 * 7
    assert (moved.up, moved.down) == (part * 4, part * 4 * 2)
    slower = costs(setting("zero2", offload=Offload(optimizer="cpu")))
    assert slower.parts["update"] > costs(setting("zero2")).parts["update"]


def test_one_rank_sends_nothing() -> None:
    assert exchanges(setting("ddp", world_size=1)) == []
    assert costs(setting("ddp", world_size=1)).parts["communication"] == 0


def test_hardware_without_a_rate_has_no_time() -> None:
    assert tabled({"device_memory_gib": 24, "host_memory_gib_per_device": 32}, accelerator=True) is None
    assert cost(setting(precision="bf16"), MACHINE, 1) is None  # no such rate, as on a T4
    assert cost(setting(), replace(MACHINE, rates=None), 1) is None
    unlinked = replace(MACHINE, rates=replace(RATES, host_link=None))
    assert cost(setting("zero2", offload=Offload(optimizer="cpu")), unlinked, 1) is None


def test_calibrated_rates_are_shared_by_the_ranks_of_a_cpu() -> None:
    figures = {"products": {"fp32": 10.0}, "attention": {"fp32": 4.0}, "memory": 6.0, "stream": 6.0, "operation": 1.0}
    figures["reached"] = {"fp32": {"256": 0.5}}  # keys as JSON has them
    two = {"threads": 2, "hop": 1.0, "link": {"all-reduce": 8.0}, **figures}
    by_ranks = {"1": {"threads": 4, **figures}, "2": two}
    assert rates_of(by_ranks, 1, 4, "", 0.1, {"both": 7.0}).products["fp32"] == 10.0
    assert rates_of(by_ranks, 2, 4, "", 0.1, {"both": 7.0}).products["fp32"] == 10.0
    four, eight = (rates_of(by_ranks, ranks, 4, "", 0.1, {"both": 7.0}) for ranks in (4, 8))
    assert (four.products["fp32"], four.memory, four.link["all-reduce"], four.operation) == (5.0, 3.0, 4.0, 1.0)
    assert (eight.products["fp32"], eight.operation) == (2.5, 2.0)  # two ranks take turns on a core
    assert four.disk == 7.0
    assert four.share("fp32", 256) == 0.5


LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_work_is_six_operations_a_weight_and_token_and_eight_with_recompute(precision: Any) -> None:
    """Kaplan et al. 2020: two for the forward pass, four for the backward pass; the embedding multiplies nothing.

    Recompute stops at a block's last tensor that is asked for: its last product is not done again. Selective repeats
    every other product and no attention.
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    tokens, length = 4 * 256, 256
    blocks = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    head = model.lm_head.weight.numel()
    last = sum(layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    others = sum(
        part.weight.numel()
        for layer in model.model.layers
        for part in (layer.self_attn.k_proj, layer.self_attn.o_proj, layer.mlp.up_proj)
    )
    attention = 6 * 2 * 2 * tokens * length * 128  # two products over all heads, in six blocks
    tracer = Tracer(make_trainable(model))
    policies: tuple[tuple[Recompute, int], ...] = (
        ("none", 6 * blocks),
        ("selective", 6 * blocks + 2 * others),
        ("full", 8 * blocks - 2 * last),
    )
    for recompute, products in policies:
        timeline = tracer.timeline(row_shapes(4, length, packed=True), precision, "each", recompute)
        work = sum((span.work for span in timeline), Work())
        assert work.products == pytest.approx((products + 6 * head) * tokens, rel=2e-3)
        assert work.attention == pytest.approx(attention * (4.5 if recompute == "full" else 3.5), rel=1e-6)


TITAN: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 8192}
LLAMA_8B = (32, 4096, 14336, 32, 8, 128256, 8192, 2, "selective")
PUBLISHED: dict[str, tuple[str, tuple[int, int, int, int, int, int, int, int, Recompute], int]] = {
    # torchtitan's docs/performance.md and its report of December 2024: FSDP2, bf16; tokens per second and device
    "llama-2-13b": ("64xA100-80G", (40, 5120, 13824, 40, 40, 32000, 4096, 2, "none"), 2162),
    "llama-2-70b": ("64xA100-80G", (80, 8192, 28672, 64, 8, 32000, 4096, 2, "full"), 353),
    "llama-3-70b": ("64xA100-80G", (80, 8192, 28672, 64, 8, 128256, 8192, 1, "full"), 331),
    "llama-3.1-8b": ("8xH100-96G", LLAMA_8B, 5762),
    "llama-3.1-8b-128": ("128xH100-96G", LLAMA_8B, 5605),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_throughputs_are_met_within_a_tenth(name: str, tmp_path: Path) -> None:
    hardware, (layers, hidden, inner, heads, keys, vocabulary, length, rows, recompute), measured = PUBLISHED[name]
    machine = parse_hardware(hardware)
    config = {
        **TITAN, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": vocabulary,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe.from_dict(
        {
            "model": {"config": str(tmp_path / "config.json")},
            "data": {"tokenizer": "bytes", "sequence_length": length, "packing": False},
            "train": {"global_batch_size": machine.ranks * rows},
        }
    )
    plan = Plan("fsdp", machine.ranks, rows, 1, machine.ranks * rows, "bf16", recompute=recompute)
    found = predictor(recipe, machine).cost(plan, machine)
    assert found is not None
    assert found.tokens_per_second / machine.ranks == pytest.approx(measured, rel=0.1)
