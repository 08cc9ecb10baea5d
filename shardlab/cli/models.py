"""`eval`, `generate`, `merge` and `export`: what is done with a trained model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlab.cli.options import Json


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model directory.")],
    files: Annotated[
        list[str] | None, typer.Option(help="Held-out text files or globs. [default: the standard library's split]")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    packing: Annotated[bool, typer.Option(help="Several documents in a row, or one, cut at its end.")] = True,
    original: Annotated[
        Path | None,
        typer.Option("--compare", metavar="DIR", help="The model that it was made from: what is lost."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Loss and perplexity of a model on held-out text.

    Examples: `shardlab eval runs/demo/model --files 'notes/*.txt'`, `shardlab eval small --compare runs/demo/model`
    """
    from shardlab.recipe import DataSection
    from shardlab.train.evaluate import evaluate_directory

    given = tuple(files or ())
    data = DataSection(
        files=given,
        evaluation_files=given,
        tokenizer=str(directory.absolute()),
        sequence_length=sequence_length,
        packing=packing,
    )
    if original is not None:
        from shardlab.compress.compare import compare
        from shardlab.compress.stage import quality_figures
        from shardlab.compress.summary import quality_lines

        figures = quality_figures(compare(original, directory, data))
        typer.echo(json.dumps(figures) if as_json else "\n".join(quality_lines(figures)))
        return
    result = evaluate_directory(directory, data)
    text = "loss {loss:.4f}  perplexity {perplexity:.2f}  over {tokens:,} tokens".format(**result)
    typer.echo(json.dumps(result) if as_json else text)


def export(
    directory: Annotated[Path, typer.Argument(metavar="IN", help="A Hugging Face model directory.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="What to write, such as model.gguf.")],
    to: Annotated[str, typer.Option("--to", help="gguf, or hf: a model directory.")],
    dtype: Annotated[
        str | None,
        typer.Option(help="gguf: f32, f16, bf16, q8_0, q4_0, q4_1. hf: bf16, fp16, fp32. [default: f16; bf16]"),
    ] = None,
) -> None:
    """Write a model for another runtime, checked before it has its name.

    Examples: `shardlab export runs/demo/model model.gguf --to gguf --dtype q8_0`,
    `shardlab export runs/demo/model in-bf16 --to hf --dtype bf16`
    """
    from shardlab.errors import UserError
    from shardlab.export.gguf import export_gguf
    from shardlab.export.gguf_file import parse_dtype
    from shardlab.export.hf import export_hf

    if to == "gguf":
        typer.echo(export_gguf(directory, output, parse_dtype(dtype or "f16")).text())
    elif to == "hf":
        typer.echo(export_hf(directory, output, dtype or "bf16").text())
    else:
        raise UserError(f"--to {to}: choose gguf or hf")


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
