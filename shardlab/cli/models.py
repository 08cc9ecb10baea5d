"""`eval`, `generate`, `merge` and `export`: what is done with a trained model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.options import Json, Speed, Threads, speed_into_card


def evaluate(
    artifact: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model directory, an ONNX directory, or a GGUF file.")
    ],
    files: Annotated[
        list[str] | None, typer.Option(help="Held-out text files or globs. [default: the standard library's split]")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    packing: Annotated[bool, typer.Option(help="Several documents in a row, or one, cut at its end.")] = True,
    original: Annotated[
        Path | None,
        typer.Option("--compare", metavar="MODEL", help="The model that it was made from: what is lost."),
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Speed and memory too; each in a process of its own.")] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="With --speed: tokens of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="With --speed: tokens that are made after it.")] = 64,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Loss and perplexity of a model on held-out text, in its own runtime; what it has lost; how fast it is.

    Examples: `shardlab eval runs/demo/model --files 'notes/*.txt'`, `shardlab eval small --compare runs/demo/model`,
    `shardlab eval model.gguf --compare runs/demo/model --speed`
    """
    from shardlab.compress.stage import quality_figures
    from shardlab.compress.summary import quality_lines
    from shardlab.export.artifact import compare_artifacts, evaluate_artifact
    from shardlab.export.speed import SpeedConfig, measure_speed, speed_figures, speed_lines
    from shardlab.recipe import DataSection

    given = tuple(files or ())
    data = DataSection(files=given, evaluation_files=given, sequence_length=sequence_length, packing=packing)
    figures: dict[str, Any]
    if original is not None:
        figures = quality_figures(compare_artifacts(original, artifact, data))
        lines = quality_lines(figures)
    else:
        figures = evaluate_artifact(artifact, data)
        lines = ["loss {loss:.4f}  perplexity {perplexity:.2f}  over {tokens:,} tokens".format(**figures)]
    if speed:
        config = SpeedConfig(prompt_tokens=prompt_tokens, new_tokens=new_tokens, threads=threads)
        now = measure_speed(artifact, config)
        if original is None:
            figures["speed"] = vars(now)
            lines.append(now.line())
        else:
            figures |= speed_figures(measure_speed(original, config), now)
            lines += speed_lines(figures)
    typer.echo(json.dumps(figures) if as_json else "\n".join(lines))


def export(
    directory: Annotated[Path, typer.Argument(metavar="IN", help="A Hugging Face model directory.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="What to write: model.gguf, or a directory.")],
    to: Annotated[str, typer.Option("--to", help="gguf; onnx or hf: a directory.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="gguf: f32, f16, bf16, q8_0, q4_0, q4_1. onnx: fp32, int8, int8g32, int4, int4g64. "
            "hf: bf16, fp16, fp32. [default: f16; fp32; bf16]"
        ),
    ] = None,
    speed: Speed = False,
    threads: Threads = None,
) -> None:
    """Write a model for another runtime, checked before it has its name.

    Examples: `shardlab export runs/demo/model model.gguf --to gguf --dtype q8_0`,
    `shardlab export runs/demo/model for-onnxruntime --to onnx --dtype int8`
    """
    from shardlab.errors import UserError
    from shardlab.export.gguf import export_gguf
    from shardlab.export.gguf_file import parse_dtype
    from shardlab.export.hf import export_hf
    from shardlab.export.onnx import export_onnx
    from shardlab.export.onnx_weights import parse_onnx_dtype
    from shardlab.export.speed import speed_lines

    if to == "gguf":
        typer.echo(export_gguf(directory, output, parse_dtype(dtype or "f16")).text())
    elif to == "onnx":
        typer.echo(export_onnx(directory, output, parse_onnx_dtype(dtype or "fp32")).text())
    elif to == "hf":
        typer.echo(export_hf(directory, output, dtype or "bf16").text())
    else:
        raise UserError(f"--to {to}: choose gguf, onnx or hf")
    if speed:
        typer.echo("\n".join(speed_lines(speed_into_card(directory, output, threads))))


def generate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model directory.")],
    prompt: Annotated[str, typer.Option(help="What to go on from.")],
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 40,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
) -> None:
    """Let a model write on from a prompt.

    Example: `shardlab generate runs/demo/model --prompt 'def read_file('`
    """
    from shardlab.train.evaluate import generate as write_on

    typer.echo(write_on(directory, prompt, new_tokens=tokens, temperature=temperature, seed=seed))


def merge(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="An adapter directory, as a run with lora saves it.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
) -> None:
    """Merge LoRA adapters into the model that they were trained on.

    Example: `shardlab merge runs/tuned/model merged-model`
    """
    from shardlab.model.lora import merge_directory

    merge_directory(adapter, output)
    typer.echo(f"model: {output}")
