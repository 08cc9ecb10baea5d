"""One promise: kept by the smallest that keeps it, gone on with where it was ended, refused with what comes nearest."""

import json
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardlab.errors import UserError
from shardlab.export import fit as fitting
from shardlab.export.fit import FitConfig, fit, why_refused
from shardlab.export.promise import Promise, Tried, front, parse_promise, refusal
from shardlab.export.speed import Speed, SpeedConfig
from shardlab.recipe import DataSection
from tests.export.models import TEXT, bpe_tokenizer, needs, save_model
from tests.train.support import shardlab


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fit-text")
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"{number}: {TEXT * (1 + number % 3)}", encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """It has learned the text, so that rounding costs what it does."""
    directory = tmp_path_factory.mktemp("fit-model") / "model"
    tokenizer = bpe_tokenizer(280)
    model = save_model(directory, "llama", tokenizer, 320)
    ids = tokenizer("0: " + TEXT * 2, return_tensors="pt")["input_ids"][:, :64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def section(model: Path, text: Path) -> DataSection:
    files = (str(text / "*.txt"),)
    return DataSection(files=files, tokenizer=str(model), sequence_length=32, evaluation_fraction=0.2)


CONFIG = FitConfig(Promise(max_increase=0.5), formats=("hf",), shares=(0.0, 0.25), calibration=8, held_out=8)


def test_the_smallest_that_keeps_the_promise(model: Path, text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = fit(model, tmp_path / "out", tmp_path / "work", CONFIG, section(model, text), said.append)
    kept = [one for one in found.tried if one.increase <= 0.5]
    assert found.best == min(kept, key=lambda one: one.bytes)
    assert {one.name for one in found.tried} >= {f"hf {pack}" for pack in fitting.PACKS["hf"]}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 320
    account = json.loads((tmp_path / "out/shardlab_fit.json").read_text())
    assert account["best"]["name"] == found.best.name
    assert account["original_bytes"] > found.best.bytes
    circles = [e for e in xml.etree.ElementTree.parse(found.picture).iter() if e.tag.endswith("circle")]
    assert len(circles) == len(found.tried)


def test_it_goes_on_where_it_was_ended(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    quantize = fitting.quantize

    def counted(source, output, config, *rest):  # type: ignore[no-untyped-def]
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(config.scheme)
        return quantize(source, output, config, *rest)

    monkeypatch.setattr(fitting, "quantize", counted)
    config = replace(CONFIG, shares=(0.0,))
    given = (model, tmp_path / "out", tmp_path / "work", config, section(model, text), lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        fit(*given)
    made_before, made[:] = list(made), []
    found = fit(*given)
    assert made_before + made == list(fitting.PACKS["hf"])
    again = replace(config, promise=Promise(max_increase=0.4))  # another promise over the same candidates
    second = fit(model, tmp_path / "other", tmp_path / "work", again, *given[4:])
    assert second.tried == found.tried
    with pytest.raises(UserError, match="is of another search"):
        fit(model, tmp_path / "third", tmp_path / "work", replace(config, held_out=4), *given[4:])


def test_speed_is_measured_from_the_smallest_on(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Path] = []

    def measured(path: Path, _config: SpeedConfig) -> Speed:
        timed.append(path)
        quick = {"hf-int4g32": 3.0, "hf-int3g32": 1.0}.get(path.name, 1.0)
        return Speed("hf", 100.0, quick, 1, 1, 16, 4, 1, 1, 0.0)

    monkeypatch.setattr(fitting, "measure_speed", measured)
    promise = Promise(max_increase=50.0, min_decode_speedup=2.0)
    config = replace(CONFIG, shares=(0.0,), promise=promise)
    found = fit(model, tmp_path / "out", tmp_path / "work", config, section(model, text), lambda _: None)
    assert found.best is not None
    assert (found.best.name, found.best.decode_speedup) == ("hf int4g32", 3.0)
    assert [path.name for path in timed] == ["model", "hf-int3g32", "model", "hf-int4g32"]


def test_a_promise_that_can_not_be_kept(model: Path, text: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, shares=(0.0,), promise=Promise(max_bytes=1000, max_increase=1e-6))
    found = fit(model, tmp_path / "out", tmp_path / "work", config, section(model, text), lambda _: None)
    assert found.best is None
    assert not (tmp_path / "out").exists()
    assert "nearest is hf int3g32: 0." in why_refused(found, config.promise)


def test_the_words_of_a_refusal() -> None:
    promise = Promise(max_bytes=1e6, max_increase=0.03)
    tried = [Tried("a", 2_000_000, 0.01), Tried("b", 900_000, 0.2), Tried("c", 1_100_000, 0.04)]
    said = refusal(promise, tried)
    assert said.startswith("none of 3 keeps at most 1.00 MB, perplexity at most +3.00%; nearest is c: 1.10 MB")
    assert "which misses bytes by 10.0%, perplexity by 1.0%" in said
    assert "smallest with that perplexity: a: 2.00 MB, perplexity +1.00%" in said
    assert "best of that size: b: 0.90 MB, perplexity +20.00%" in said
    assert [one.name for one in front(tried)] == ["b", "c", "a"]
    assert promise.excess(Tried("nan", 1, float("nan"))).keys() == {"perplexity"}


def test_promises_are_read() -> None:
    assert parse_promise("60MB", "3%", 2.0) == Promise(60e6, 0.03, 2.0)
    assert parse_promise("1.5 GiB", "0.03", None) == Promise(1.5 * 2**30, 0.03, None)
    for wrong in ((None, None, None), ("60 apples", None, None), ("0MB", None, None), (None, "x", None)):
        with pytest.raises(UserError):
            parse_promise(*wrong)


@pytest.mark.slow
def test_the_command_tries_every_format(model: Path, text: Path, tmp_path: Path) -> None:
    needs("gguf", "cyllama", "onnx", "onnxscript", "onnxruntime")
    out = tmp_path / "out"
    rows = ["--files", str(text / "*.txt"), "--sequence-length", "32", "--calibration", "8", "--held-out", "8"]
    done = shardlab("fit", str(model), str(out), "--max-ppl-increase", "20%", *rows)
    assert done.code == 0, done.err
    assert "the front" in done.out
    account = json.loads((out / "shardlab_fit.json").read_text())
    assert {one["name"].split()[0] for one in account["tried"]} == {"hf", "gguf", "onnx"}
    refused = shardlab("fit", str(model), str(tmp_path / "none"), "--max-bytes", "1KB", "--work", f"{out}.fit", *rows)
    assert refused.code == 2
    assert "nearest is " in refused.err
