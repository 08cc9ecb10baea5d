"""What is decided before anything is computed."""

import pytest

from shardlab.errors import UserError
from shardlab.model.grid import Grid
from shardlab.model.schemes import Layer, Scheme, choose, parse_rules, parse_scheme

LAYERS = [Layer("layers.0.wide", 8, 96), Layer("layers.0.even", 8, 64), Layer("layers.1.odd", 8, 30)]
INT4 = Scheme(Grid(4, 32))


def test_names() -> None:
    assert parse_scheme("int8") == Scheme(Grid(8))
    assert parse_scheme("int4") == Scheme(Grid(4, 128))
    assert parse_scheme("int4", 32) == Scheme(Grid(4, 32))
    assert parse_scheme("int4g64", 32) == Scheme(Grid(4, 64))
    assert parse_scheme("w8a8") == Scheme(Grid(8), int8_inputs=True)
    assert parse_scheme("int4g64").name == "int4g64"
    for wrong in ("int1", "int9", "fp4", "int4g0", "w8a8g32"):
        with pytest.raises(UserError, match="scheme"):
            parse_scheme(wrong)


def test_groups_that_do_not_divide_are_named_before_anything_runs() -> None:
    """Field case B62, https://github.com/vllm-project/llm-compressor/issues/1983: found at the save, without a name."""
    with pytest.raises(UserError, match=r"layers\.1\.odd \(30 inputs\): .*skip.*smaller.*channel") as raised:
        choose(LAYERS, INT4, {})
    assert "wide" not in str(raised.value)


@pytest.mark.parametrize(("policy", "group"), [("skip", "none"), ("smaller", 30), ("channel", None)])
def test_policies_for_groups_that_do_not_divide(policy: str, group: object) -> None:
    choices = choose(LAYERS, INT4, {}, policy)  # type: ignore[arg-type]
    assert choices["layers.0.wide"].scheme == choices["layers.0.even"].scheme == INT4
    odd = choices["layers.1.odd"]
    assert (odd.scheme.grid.group_size if odd.scheme else "none") == group
    assert odd.reason is not None
    assert "groups of 32 don't divide" in odd.reason


def test_the_last_rule_that_matches_wins() -> None:
    rules = parse_rules(["layers.*=int8", "*.even=none", "*.odd=int4g15"])
    choices = choose(LAYERS, INT4, rules)
    assert choices["layers.0.wide"].scheme == Scheme(Grid(8))
    assert choices["layers.0.even"].scheme is None
    assert choices["layers.1.odd"].scheme == Scheme(Grid(4, 15))


def test_a_rule_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"'\*\.norm' matches no layer; layers are named like 'layers\.0\.wide'"):
        choose(LAYERS, INT4, parse_rules(["*.norm=int8"]))
    with pytest.raises(UserError, match="PATTERN=SCHEME"):
        parse_rules(["int8"])
