"""`quantize`: what makes a trained model smaller."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.options import Json, to_stderr

DEFAULT_LENGTH = 256

Source = Annotated[Path, typer.Argument(metavar="IN", help="A Hugging Face model directory.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must not exist.")]
Files = Annotated[
    list[str] | None,
    typer.Option(help="Text files or globs; a part is held out. [default: the standard library's split]"),
]
Calibration = Annotated[int, typer.Option(min=1, help="Rows of text to calibrate with.")]
HeldOut = Annotated[int, typer.Option(min=1, help="Rows of held-out text to judge by.")]
SequenceLength = Annotated[
    int | None, typer.Option(min=1, help="Tokens per row. [default: 256, or the model's positions if fewer]")
]


def quantize(
    source: Source,
    output: Target,
    scheme: Annotated[str, typer.Option(help="int8, int4, int2 to int7, w8a8, or int4g32 with its groups.")] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Inputs for each scale. [default: 128 for int4, 32 below, else a row]"),
    ] = None,
    method: Annotated[
        str, typer.Option(help="gptq: errors are made up for, by calibration; rtn: round to nearest.")
    ] = "gptq",
    local: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=SCHEME", help="Another scheme, or none, for layers by name; the last wins."),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="The head too; a tied one becomes a tensor of its own.")] = False,
    on_indivisible: Annotated[
        str, typer.Option(help="Where groups don't divide a layer: error, skip, smaller groups, or channel.")
    ] = "error",
    dtype: Annotated[str, typer.Option(help="Of scales and all that is not quantized: bf16, fp16, fp32.")] = "bf16",
    files: Files = None,
    calibration: Calibration = 128,
    held_out: HeldOut = 128,
    sequence_length: SequenceLength = None,
    seed: Annotated[int, typer.Option(help="Of the choice of calibration rows.")] = 0,
    as_json: Json = False,
) -> None:
    """Round a model's linear layers to few bits, and say what that costs on held-out text.

    OUT loads in transformers and vLLM (compressed-tensors). One block at a time is in memory.

    Examples: `shardlab quantize runs/demo/model small --scheme int4 --group-size 32`,
    `shardlab quantize IN OUT --scheme int4 --local '*.down_proj=int8' --local '*.layers.0.*=none'`
    """
    from shardlab.compress.quantize import QuantizeConfig
    from shardlab.compress.quantize import quantize as run
    from shardlab.compress.stage import read_rows, refuse_existing, source_config

    config = QuantizeConfig(
        scheme=scheme,
        group_size=group_size,
        method=method,  # type: ignore[arg-type]  # what it may be is said by the stage
        local=tuple(local or ()),
        head=head,
        on_indivisible=on_indivisible,  # type: ignore[arg-type]
        dtype=dtype,
    )
    refuse_existing(output)
    positions = source_config(source).get("max_position_embeddings", DEFAULT_LENGTH)
    length = sequence_length or min(DEFAULT_LENGTH, positions)
    rows = read_rows(_text(source, files, length), calibration=calibration, held_out=held_out, seed=seed)
    card = run(source, output, config, rows, length, to_stderr)
    typer.echo(json.dumps(card.figures) if as_json else _figures(card.figures, output))


def _text(source: Path, files: list[str] | None, sequence_length: int) -> Any:
    from shardlab.recipe import DataSection

    return DataSection(files=tuple(files or ()), tokenizer=str(source.absolute()), sequence_length=sequence_length)


def _figures(figures: Any, output: Path) -> str:
    perplexity, size = figures["perplexity"], figures["weight_bytes"]
    change = perplexity["after"] / perplexity["before"] - 1
    return "\n".join(
        [
            f"perplexity {perplexity['before']:.3f} -> {perplexity['after']:.3f} ({change:+.2%}) "
            f"over {figures['held_out_tokens']:,} held-out tokens",
            f"likeliest token the same for {figures['top_token_agreement']:.1%}, "
            f"KL divergence {figures['kl_divergence']:.5f}",
            f"weights {size['before'] / 2**20:.2f} -> {size['after'] / 2**20:.2f} MiB "
            f"({size['before'] / size['after']:.2f} times smaller)",
            f"model: {output}",
        ]
    )
