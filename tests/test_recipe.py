"""A recipe is read as written, or refused in one line that names the key, the value and the mend."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.errors import UserError
from shardlab.recipe import SGD, AdamW, CosineSchedule, LinearSchedule, Recipe, dump_recipe, load_recipe, recipe_schema

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def write(tmp_path: Path):
    def write_recipe(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        Recipe.from_dict(raw)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Defaults and what is read


def test_every_key_may_be_left_out():
    recipe = Recipe.from_dict({})
    assert (recipe.model.preset, recipe.data.source, recipe.data.tokenizer) == ("6m", "stdlib", "bpe-8k")
    assert recipe.train.optimizer == AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert recipe.train.schedule == CosineSchedule(warmup_steps=20, final_fraction=0.1)
    assert (recipe.shard.backend, recipe.shard.micro_batch) == ("auto", "auto")
    assert Recipe.from_dict({"train": None}) == recipe


def test_the_name_chooses_the_keys():
    train = {
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9},
        "schedule": {"name": "linear", "warmup_steps": 0},
    }
    recipe = Recipe.from_dict({"train": train})
    assert recipe.train.optimizer == SGD(name="sgd", lr=0.5, momentum=0.9)
    assert recipe.train.schedule == LinearSchedule(name="linear", warmup_steps=0, final_fraction=0.0)


def test_nothing_changes_after_validation():
    recipe = Recipe.from_dict({"model": {"freeze": ["*.embed_tokens.*"]}})
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.steps = 3
    assert recipe.model.freeze == ("*.embed_tokens.*",)


@pytest.mark.parametrize(
    ("text", "lr"), [("1e-3", 1e-3), ("1.0e-3", 1e-3), ("1E3", 1000.0), (".5", 0.5), ("5e-05", 5e-05), ("1", 1.0)]
)
def test_numbers_are_numbers_however_written(write, text: str, lr: float):
    assert load_recipe(write(f"train: {{optimizer: {{lr: {text}}}}}")).train.optimizer.lr == lr


def test_yaml_reads_no_octals_sexagesimals_or_spoken_booleans(write):
    """PyYAML's own rules make 8, 90 and False of these."""
    assert load_recipe(write("train: {steps: 010}")).train.steps == 10
    for value in ("1:30", "off"):
        with pytest.raises(UserError, match=f'expected an integer, got the string "{value}"'):
            load_recipe(write(f"train: {{steps: {value}}}"))


def test_paths_start_at_the_recipe_and_those_of_overrides_at_the_working_directory(write, tmp_path, monkeypatch):
    path = write("{model: {config: c.json}, data: {files: ['a/*.txt', /b.txt], tokenizer: tok, cache_dir: null}}")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = load_recipe(path, ["data.evaluation_files=[e.txt]"])
    assert recipe.model.config == str(tmp_path / "c.json")
    assert recipe.data.files == (str(tmp_path / "a/*.txt"), "/b.txt")
    assert recipe.data.tokenizer == str(tmp_path / "tok")
    assert recipe.data.evaluation_files == (str(tmp_path / "elsewhere/e.txt"),)
    assert recipe.data.source is None
    assert load_recipe(path, ["data.tokenizer=bytes"]).data.tokenizer == "bytes"


# Overrides


def test_overrides_are_yaml_and_the_later_wins(write):
    overrides = ["train.steps=5", "train.steps=7", "train.clip_grad_norm=null", "train.optimizer={name: sgd, lr: 1e-2}"]
    recipe = load_recipe(write("train: {steps: 3, seed: 4}"), overrides)
    assert (recipe.train.steps, recipe.train.seed, recipe.train.clip_grad_norm) == (7, 4, None)
    assert recipe.train.optimizer == SGD(name="sgd", lr=0.01)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.stepz=5", "with --set train.stepz=5: unknown key train.stepz; did you mean steps?"),
        ("train.steps=many", 'with --set train.steps=many: train.steps: expected an integer, got the string "many"'),
        ("train.steps", "--set train.steps: expected section.key=value"),
        ("=5", "--set =5: expected section.key=value"),
        ("train.steps.first=5", "--set train.steps.first=5: train.steps holds a value, not keys"),
        ("train.steps=[", "--set train.steps=[, line 1: not valid YAML"),
    ],
)
def test_a_bad_override_is_named(write, override: str, complaint: str):
    with pytest.raises(UserError) as caught:
        load_recipe(write("train: {steps: 3}"), ["train.seed=1", override])
    assert complaint in str(caught.value)
    assert "train.seed" not in str(caught.value)


# Files that are no recipe


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the recipe is empty"),
        ("# nothing yet\n", "the recipe is empty"),
        ("- train\n", "line 1: a recipe is sections of keys"),
        ("train", "not the single value train"),
        ("train:\n  steps: 5\n  steps: 6\n", "line 3: not valid YAML: the key steps stands twice"),
        ("train:\n  steps: 5\n seed: 6\n", "line 3: not valid YAML"),
        ("train: {steps: !!python/object:os.system {}}", "not valid YAML: could not determine a constructor"),
        ("train:\n\tsteps: 5\n", "line 2: not valid YAML"),
        ("1: 2", "keys are words, got 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_line(write, text: str, complaint: str):
    path = write(text)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(str(path))
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"missing\.yaml: cannot read the recipe: No such file"):
        load_recipe(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00\xfe\x80")
    with pytest.raises(UserError, match=r"binary\.yaml: not valid YAML"):
        load_recipe(tmp_path / "binary.yaml")


# Unknown keys


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"trian": {}}, "unknown key trian; did you mean train?"),
        ({"train": {"batch_size": 8}}, "unknown key train.batch_size; did you mean global_batch_size?"),
        (
            {"train": {"optimizer": {"learning_rate": 3}}},
            "unknown key train.optimizer.learning_rate; did you mean lr?",
        ),
        ({"train": {"lr": 3}}, "unknown key train.lr; did you mean train.optimizer.lr?"),
        ({"train": {"micro_batch": 3}}, "unknown key train.micro_batch; did you mean shard.micro_batch?"),
        ({"train": {"max_grad_norm": 3}}, "unknown key train.max_grad_norm; did you mean clip_grad_norm?"),
        ({"shard": {"offload": {"optimiser": "cpu"}}}, "unknown key shard.offload.optimiser; did you mean optimizer?"),
        (
            {"train": {"optimizer": {"groups": [{"pattern": "*", "lrr": 1.0}]}}},
            "unknown key train.optimizer.groups[0].lrr; did you mean lr?",
        ),
        ({"plan": {}}, "unknown key plan; known keys here: model, data, train, distill, shard, checkpoint"),
        (
            {"train": {"optimizer": {"name": "sgd", "betas": [0.9, 0.95]}}},
            "train.optimizer.betas is a key of adamw, not of sgd",
        ),
        ({"train": {"schedule": {"name": "constant", "final_fraction": 0.1}}}, "is a key of cosine and linear"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest(raw: dict[str, Any], complaint: str):
    assert complaint in refusal(raw)


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@given(st.sampled_from(["model", "data", "train", "shard"]), KEYS, st.integers())
@settings(max_examples=60, deadline=None)
def test_no_unknown_key_passes(section: str, key: str, value: int):
    if key not in getattr(Recipe.from_dict({}), section).__class__.model_fields:
        assert f"unknown key {section}.{key}" in refusal({section: {key: value}})


def test_a_misspelled_clipping_is_not_a_default():
    """https://github.com/deepspeedai/DeepSpeed/issues/1809 and
    https://github.com/deepspeedai/DeepSpeed/issues/774: the misspelled key is accepted and the default clips."""
    assert "gradient_cliping; did you mean clip_grad_norm?" in refusal({"train": {"gradient_cliping": 0.0}})


# Bad values


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"train": {"steps": 1.5}}, "train.steps: expected an integer, got 1.5"),
        ({"train": {"steps": True}}, "train.steps: expected an integer, got true"),
        ({"train": 5}, "train: expected a section of keys, got 5"),
        ({"train": {"optimizer": "sgd"}}, 'train.optimizer: expected a section of keys, got the string "sgd"'),
        ({"train": {"optimizer": {"name": "adam"}}}, "train.optimizer.name: expected one of adamw, sgd"),
        ({"train": {"optimizer": {"betas": [0.9]}}}, "train.optimizer.betas[1] is missing"),
        ({"train": {"optimizer": {"betas": [0.9, 1.0]}}}, "train.optimizer.betas[1]: expected a number below 1, got 1"),
        ({"train": {"optimizer": {"lr": float("nan")}}}, "train.optimizer.lr: expected a finite number, got nan"),
        ({"train": {"optimizer": {"groups": [{"lr": 0.1}]}}}, "train.optimizer.groups[0].pattern is missing"),
        ({"train": {"precision": "bf15"}}, 'train.precision: expected bf16 or fp32, got the string "bf15"'),
        ({"train": {"on_nonfinite": "warn"}}, "train.on_nonfinite: expected stop or skip"),
        ({"train": {"evaluate_every": 0}}, "train.evaluate_every: expected a number above 0 or null, got 0"),
        ({"data": {"files": "a.txt"}}, 'data.files: expected a list, got the string "a.txt"'),
        ({"data": {"tokenizer": "bpe-8"}}, "data.tokenizer: expected bpe-<N>k such as bpe-8k"),
        ({"data": {"tokenizer": "bpe-0k"}}, "data.tokenizer: expected bpe-<N>k such as bpe-8k"),
        ({"data": {"evaluation_fraction": 1.0}}, "data.evaluation_fraction: expected a number below 1, got 1"),
        ({"model": {"builder": "package.module"}}, 'model.builder: expected "package.module:function"'),
        ({"shard": {"reshard_after_forward": 1}}, "shard.reshard_after_forward: expected true or false, got 1"),
        ({"train": {"steps": 0, "seed": -1}}, "(and 1 more like it to mend)"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected(raw: dict[str, Any], complaint: str):
    assert complaint in refusal(raw)


@pytest.mark.parametrize("key", ["train.steps", "train.global_batch_size", "data.sequence_length", "shard.micro_batch"])
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_of_nothing_is_refused_about_that_size(key: str, value: int):
    """https://github.com/deepspeedai/DeepSpeed/issues/17: the complaint was about the product of the batch sizes."""
    section, name = key.split(".")
    complaint = refusal({section: {name: value}})
    assert complaint.startswith(f"recipe: {key}: expected a number above 0")
    assert complaint.endswith(f"got {value}")


@pytest.mark.parametrize("key", ["train.steps", "train.global_batch_size", "shard.micro_batch", "shard.world_size"])
def test_a_number_in_quotes_is_refused_with_its_type(key: str):
    """https://github.com/hendrycks/apps/issues/9 and https://github.com/hiyouga/LlamaFactory/issues/1116: "8" is not 8,
    and the comparison failed with `8 vs 8` or a bare TypeError."""
    section, name = key.split(".")
    assert 'got the string "8"' in refusal({section: {name: "8"}})


# Contradictions


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"model": {"preset": "tiny", "path": "m"}}, "model: preset and path are both given"),
        ({"data": {"source": "stdlib", "files": ["a.txt"]}}, "data: source and files are both given"),
        (
            {"shard": {"backend": "zero2", "offload": {"parameters": "cpu"}}},
            "offload.parameters=cpu needs backend zero3 or fsdp, not zero2",
        ),
        (
            {"shard": {"backend": "ddp", "offload": {"optimizer": "cpu"}}},
            "offload.optimizer=cpu needs backend zero1, zero2, zero3 or fsdp, not ddp",
        ),
    ],
)
def test_contradictions_are_refused(raw: dict[str, Any], complaint: str):
    assert complaint in refusal(raw)


@pytest.mark.parametrize("backend", ["zero3", "fsdp", "auto"])
def test_offload_is_accepted_where_it_may_be_carried_out(backend: str):
    """https://github.com/deepspeedai/DeepSpeed/pull/2971: contradictory offload was swallowed; the other half."""
    offload = {"parameters": "cpu", "optimizer": "cpu"}
    assert Recipe.from_dict({"shard": {"backend": backend, "offload": offload}}).shard.offload.optimizer == "cpu"


@pytest.mark.parametrize("precision", ["fp16", "float16", "half"])
def test_fp16_is_refused_with_the_reason_and_bf16_offered(precision: str):
    """https://github.com/pytorch/pytorch/issues/74041: fp16 without a GPU failed deep inside an operator."""
    complaint = refusal({"train": {"precision": precision}})
    assert "loss scaling" in complaint
    assert "use bf16" in complaint


@pytest.mark.parametrize("key", ["bf16", "fp16", "mixed_precision"])
def test_precision_has_one_owner(key: str):
    """https://github.com/huggingface/accelerate/issues/3197: precision set in two places, refused about an option that
    the user never set."""
    assert f"unknown key train.{key}; did you mean precision?" in refusal({"train": {key: True, "precision": "bf16"}})


def test_no_clipping_can_be_said_and_zero_is_not_mistaken_for_it():
    """https://github.com/huggingface/accelerate/pull/2791: "no clipping" left a value that meant 1.0."""
    assert Recipe.from_dict({"train": {"clip_grad_norm": None}}).train.clip_grad_norm is None
    assert "expected a number above 0 or null, got 0" in refusal({"train": {"clip_grad_norm": 0}})


# Round trips


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
OPTIMIZERS = st.one_of(
    st.fixed_dictionaries({"name": st.just("sgd"), "momentum": st.floats(0, 0.99)}),
    st.fixed_dictionaries(
        {
            "lr": st.floats(1e-12, 1e3),
            "groups": st.lists(
                st.fixed_dictionaries({"pattern": NAMES, "lr": st.none() | st.floats(1e-9, 1)}), max_size=2
            ),
        }
    ),
)
RECIPES = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"path": NAMES, "freeze": st.lists(NAMES, max_size=3)}),
        "data": st.fixed_dictionaries({"files": st.lists(NAMES, max_size=2)}),
        "train": st.fixed_dictionaries(
            {
                "steps": st.integers(1, 10**9),
                "optimizer": OPTIMIZERS,
                "schedule": st.sampled_from([{"name": "linear"}, {"name": "constant", "warmup_steps": 0}, {}]),
                "clip_grad_norm": st.none() | st.floats(1e-6, 1e6),
            }
        ),
        "shard": st.fixed_dictionaries({"micro_batch": st.just("auto") | st.integers(1, 64)}),
    }
)


@given(RECIPES)
@settings(max_examples=60, deadline=None)
def test_what_is_dumped_is_read_back_the_same_and_fits_the_schema(tmp_path_factory, raw: dict[str, Any]):
    raw["model"]["path"] = "/" + raw["model"]["path"]  # a dumped recipe holds absolute paths
    raw["data"]["files"] = ["/" + name for name in raw["data"]["files"]]
    recipe = Recipe.from_dict(raw)
    path = tmp_path_factory.mktemp("dumped") / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe
    jsonschema.validate(recipe.model_dump(mode="json"), recipe_schema())


@pytest.mark.parametrize("raw", [{"train": {"stepz": 1}}, {"train": {"steps": "8"}}, {"shard": {"micro_batch": -2}}])
def test_the_schema_refuses_what_the_recipe_refuses(raw: dict[str, Any]):
    json.dumps(recipe_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, recipe_schema())


@pytest.mark.parametrize("path", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_recipes_here_are_recipes(path: Path):
    assert load_recipe(path).train.steps > 0
