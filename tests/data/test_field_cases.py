"""What people met in public, from the file to the trained model."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.data.test_records import B25_LINES, B25_PLACES, GOOD
from tests.distributed.pool import Pools
from tests.train.support import TINY, shardlab, steps, write_recipe


def test_generation_stops_where_the_end_token_was_learned(tmp_path: Path) -> None:
    """Pad token = end token, overfit on "a b <eos>", padded rows: greedy generation stops after 3 tokens.

    https://github.com/huggingface/trl/issues/1623 , https://github.com/huggingface/trl/pull/3091
    """
    words = Tokenizer(models.WordLevel({"c": 0, "<unk>": 1, "<eos>": 2, "a": 5, "b": 6}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    saved = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    saved.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a b"}) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "eos_token_id": 2}))
    recipe = write_recipe(
        tmp_path,
        model={"config": str(tmp_path / "config.json")},
        data={
            "files": [str(tmp_path / "text.jsonl")],
            "tokenizer": str(tmp_path / "tokenizer"),
            "packing": False,
            "sequence_length": 5,
            "evaluation_fraction": 0.0,
        },
        train={"steps": 60, "global_batch_size": 2, "optimizer": {"name": "adamw", "lr": 0.01}},
    )
    ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    prompt = tokenizer("a", return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0].tolist()
    assert ids == [5, 6, 2]


def test_answers_beyond_the_cut_are_counted_and_the_rest_trains(tmp_path: Path) -> None:
    """Truncation cuts off the answers of the first 4 of 16: no window is without a target, the report says 4.

    https://github.com/huggingface/trl/issues/6668 , https://github.com/huggingface/trl/pull/6320
    """
    pairs = [("question " * (9 if number < 4 else 1), f"answer {number}") for number in range(16)]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    recipe = write_recipe(
        tmp_path,
        data={
            "files": [str(tmp_path / "pairs.jsonl")],
            "format": "instruct",
            "packing": False,
            "evaluation_fraction": 0.0,
        },
    )
    ended = shardlab("train", recipe, "--output", tmp_path / "run")
    assert ended.code == 0, ended.err
    assert "masked rows: 4 documents left out" in ended.out
    assert json.loads((tmp_path / "run/summary.json").read_text())["data"]["masked_rows"] == 4
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(step["tokens"] > 0 and step["loss"] > 0 for step in metrics)


def test_training_skips_bad_records_and_says_which(tmp_path: Path) -> None:
    """Empty, over-long, not UTF-8 and so on.

    https://github.com/openai/gpt-2-output-dataset/issues/51 , https://github.com/nshepperd/gpt-2/pull/39 ,
    https://github.com/luyug/COIL/issues/7 , https://github.com/huggingface/transformers/issues/2446
    """
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join([GOOD.encode(), GOOD.encode() + b"\r", *B25_LINES.values()]))
    recipe = write_recipe(
        tmp_path, data={"files": [str(path)], "sequence_length": 64, "evaluation_fraction": 0.0, "packing": False}
    )
    refused = shardlab("train", recipe, "--output", tmp_path / "run")
    assert "8 of 10 records are bad" in refused.error
    assert not (tmp_path / "run").exists()
    ended = shardlab("train", recipe, "--output", tmp_path / "run", "--set", "data.on_bad_record=skip")
    assert ended.code == 0, ended.err
    data = json.loads((tmp_path / "run/summary.json").read_text())["data"]
    assert (data["documents"], data["records"], set(data["problems"])) == (2, 10, set(B25_PLACES))
    for problem in B25_PLACES:
        assert f"{problem}: 1  {path}:" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["streamed text", "streamed pairs", "padded pairs"])
def test_two_ranks_learn_from_the_same_rows_as_one(pools: Pools, tmp_path: Path, kind: str) -> None:
    """https://github.com/huggingface/transformers/pull/40610"""
    data = {"evaluation_fraction": 0.0, "streaming": kind.startswith("streamed"), "packing": kind != "padded pairs"}
    if kind.endswith("pairs"):
        pairs = [{"prompt": f"{n} and {n}? ", "completion": "yes " * (1 + n % 5)} for n in range(60)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        data |= {"files": [str(tmp_path / "pairs.jsonl")], "format": "instruct"}
    recipe = write_recipe(tmp_path, data=data)
    outputs = tmp_path / "one", tmp_path / "two"
    ended = shardlab("train", recipe, "--output", outputs[0])
    assert ended.code == 0, ended.err
    assert (tmp_path / "cache/tokens").exists() != kind.startswith("streamed")
    if not kind.startswith("streamed"):
        shutil.rmtree(tmp_path / "cache")  # the two ranks make it for themselves
    summary, _ = pools.run(2, "tests.train.jobs", "train_run", recipe=recipe, output=outputs[1])
    assert isinstance(summary, dict), summary
    one, two = map(steps, outputs)
    assert [step["tokens"] for step in one] == [step["tokens"] for step in two]
    assert [step["loss"] for step in two] == pytest.approx([step["loss"] for step in one], rel=1e-5)
    assert (tmp_path / "cache/tokens").exists() != kind.startswith("streamed")
