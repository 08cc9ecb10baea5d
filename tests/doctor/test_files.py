"""Linting files from the command line: a newcomer's mistake is one line, and the exit code is 2."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shardlab.cli import app
from shardlab.doctor.files import lint_files
from shardlab.errors import UserError

NEWCOMERS = Path(__file__).with_name("newcomers")


def doctor(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


@pytest.mark.parametrize(
    ("ds_config", "accelerate", "line"),
    [
        (
            "typing_error.json",
            None,
            "typing_error.json: gradient_cliping: unknown key, and DeepSpeed passes over it in silence; "
            "did you mean gradient_clipping?",
        ),
        (
            "copied_offload.json",
            None,
            "copied_offload.json: zero_optimization.offload_param.device: parameters can be offloaded at stage 3 only, "
            "and the stage is 2; set zero_optimization.stage to 3, or remove offload_param",
        ),
        (
            "nvme.json",
            None,
            "nvme.json: zero_optimization.offload_param.nvme_path: device is nvme, and there is no path; "
            "give a directory on the NVMe disk",
        ),
        (
            "batch.json",
            "batch_accelerate.yaml",
            "batch.json: train_batch_size: 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 "
            "x 4 ranks (batch_accelerate.yaml: num_processes) = 64; set train_batch_size to 64, or leave it out",
        ),
        (
            "fp16.json",
            "bf16_accelerate.yaml",
            "bf16_accelerate.yaml: mixed_precision: is bf16 here, and fp16.json has fp16.enabled true: the two say "
            "different things; remove it here, and write the precision in fp16.json",
        ),
        (
            None,
            "two_cpus.yaml",
            "two_cpus.yaml: num_processes: 2 processes are asked for, and distributed_type MULTI_CPU with use_cpu: "
            "true starts ONE, without a word; use distributed_type: MULTI_GPU and use_cpu: false, with "
            "Accelerator(cpu=True) where there is no GPU (or shardlab's --nproc, or torchrun)",
        ),
    ],
)
def test_a_newcomers_mistake_is_one_line(
    ds_config: str | None, accelerate: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/deepspeedai/DeepSpeed/issues/1809, https://github.com/deepspeedai/DeepSpeed/pull/2971,

    https://github.com/deepspeedai/DeepSpeed/issues/17, https://github.com/huggingface/accelerate/issues/3197 and
    https://github.com/huggingface/accelerate/issues/2741
    """
    monkeypatch.chdir(NEWCOMERS)
    arguments = ["--ds-config", ds_config] if ds_config else []
    done = doctor(*arguments, *(["--accelerate", accelerate] if accelerate else []))
    assert done.exit_code == 2
    assert [said for said in done.stdout.splitlines() if said.startswith("error")] == [f"error: {line}"]


def test_an_accelerate_file_brings_the_ds_config_that_it_names() -> None:
    """Which stands beside it, where the working directory has none of that name."""
    done = doctor("--accelerate", NEWCOMERS / "batch_accelerate.yaml")
    assert done.exit_code == 2
    assert "= 64" in done.stdout


def test_a_sound_file_is_no_failure(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    values = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
    file.write_text(json.dumps(values))
    done = doctor("--ds-config", file)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "0 errors, 0 warnings"


def test_ranks_can_be_given() -> None:
    at_two = doctor("--ds-config", NEWCOMERS / "batch.json", "--nproc", 2)
    assert at_two.exit_code == 0
    assert "micro-batch 4 x accumulation 4 x 2 ranks = 32 sequences" in at_two.stdout
    assert doctor("--ds-config", NEWCOMERS / "batch.json", "--nproc", 3).exit_code == 2


def test_an_unknown_key_that_is_meant() -> None:
    file = NEWCOMERS / "typing_error.json"
    assert doctor("--ds-config", file, "--allow", "gradient_cliping").exit_code == 0


def test_json_for_scripts() -> None:
    done = doctor("--ds-config", NEWCOMERS / "typing_error.json", "--json")
    found = json.loads(done.stdout)
    assert found["errors"] == 1
    assert found["findings"][0]["key"] == "gradient_cliping"


def test_the_model_says_what_auto_becomes(tmp_path: Path) -> None:
    file, model = tmp_path / "ds.json", tmp_path / "config.json"
    zero = {"stage": 3, "reduce_bucket_size": "auto"}
    file.write_text(json.dumps({"train_batch_size": 1, "gradient_clipping": 1.0, "zero_optimization": zero}))
    model.write_text(json.dumps({"hidden_size": 64}))
    for given in (model, tmp_path):
        assert "auto becomes 4096 " in doctor("--ds-config", file, "--model", given).stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": 1,}', "line 1: not valid JSON"),
        ("[1]", "is an object of keys"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "the key enabled stands twice"),
        (None, "cannot read a ds_config"),
    ],
)
def test_a_file_that_can_not_be_read_is_one_line(text: str | None, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=complaint) as raised:
        lint_files(file)
    assert "\n" not in str(raised.value)


def test_yaml_that_can_not_be_read_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "acc.yaml"
    file.write_text("a: [1\nb: 2\n")
    with pytest.raises(UserError, match="line 2: not valid YAML"):
        lint_files(None, file)
