"""`prune`, `quantize` and `fit`: what makes a trained model smaller."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab.cli.options import Json, Speed, Threads, speed_into_card, to_stderr
from shardlab.errors import UserError

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


def prune(
    source: Source,
    output: Target,
    method: Annotated[
        str,
        typer.Option(
            help="sparsegpt, wanda, magnitude: weights become zero. channels (of MLPs), groups (a key-value head with "
            "its query heads), layers, experts: these go."
        ),
    ] = "sparsegpt",
    sparsity: Annotated[float | None, typer.Option(help="The share that goes, such as 0.5.")] = None,
    pattern: Annotated[str | None, typer.Option(metavar="N:M", help="N weights kept in each M, such as 2:4.")] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many channels, groups, layers or experts stay, not --sparsity.")
    ] = None,
    by: Annotated[
        str, typer.Option(help="What chooses them: influence on the output, activation, or magnitude of the weights.")
    ] = "influence",
    scope: Annotated[
        str, typer.Option(help="global: by magnitude, all layers' weights are compared; layer: each layer's.")
    ] = "layer",
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Layers to leave, by name; may be given again.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as they were), bf16, fp16, fp32.")] = "auto",
    files: Files = None,
    calibration: Calibration = 128,
    held_out: HeldOut = 128,
    sequence_length: SequenceLength = None,
    seed: Annotated[int, typer.Option(help="Of the choice of calibration rows.")] = 0,
    speed: Speed = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Take weights out of a model's linear layers, or whole parts out of the model, and say what that costs.

    OUT loads in transformers as it is. One block at a time is in memory.

    Examples: `shardlab prune IN OUT --method channels --sparsity 0.25`, `shardlab prune IN OUT --pattern 2:4`,
    `shardlab prune IN OUT --method layers --keep 6`
    """
    from shardlab.compress.prune import PruneConfig
    from shardlab.compress.prune import prune as run

    config = PruneConfig(  # what may be chosen is said by the stage
        method,  # type: ignore[arg-type]
        sparsity,
        pattern,
        tuple(ignore or ()),
        dtype,
        by,  # type: ignore[arg-type]
        keep,
        scope,  # type: ignore[arg-type]
    )
    rows, length = _rows(source, output, files, sequence_length, calibration, held_out, seed)
    card = run(source, output, config, rows, length, to_stderr)
    _say(output, card.figures, speed_into_card(source, output, threads) if speed else {}, as_json)


def quantize(
    source: Source,
    output: Target,
    scheme: Annotated[
        str | None,
        typer.Option(help="int8, int4, int2 to int7, w8a8, or int4g32 with its groups. [default: int4]"),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(help="Instead of a scheme: bits for a weight on average, allotted by what each layer minds."),
    ] = None,
    widths: Annotated[
        list[int] | None, typer.Option(help="Widths for --target-bits; given again. [default: 3 4 5 6 8]")
    ] = None,
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
    speed: Speed = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Round a model's linear layers to few bits, and say what that costs on held-out text.

    OUT loads in transformers and vLLM (compressed-tensors). One block at a time is in memory.

    Examples: `shardlab quantize runs/demo/model small --scheme int4 --group-size 32`,
    `shardlab quantize IN OUT --scheme int4 --local '*.down_proj=int8' --local '*.layers.0.*=none'`
    """
    from shardlab.compress.quantize import WIDTHS, QuantizeConfig
    from shardlab.compress.quantize import quantize as run

    if target_bits is None and widths:
        raise UserError("--widths are for --target-bits")
    if target_bits is not None and scheme is not None:
        raise UserError("give either --scheme or --target-bits; --local sets the scheme of single layers")
    config = QuantizeConfig(
        scheme=scheme or "int4",
        group_size=group_size,
        method=method,  # type: ignore[arg-type]  # what it may be is said by the stage
        local=tuple(local or ()),
        head=head,
        on_indivisible=on_indivisible,  # type: ignore[arg-type]
        dtype=dtype,
        target_bits=target_bits,
        widths=tuple(widths or WIDTHS),
    )
    rows, length = _rows(source, output, files, sequence_length, calibration, held_out, seed)
    card = run(source, output, config, rows, length, to_stderr)
    _say(output, card.figures, speed_into_card(source, output, threads) if speed else {}, as_json)


def fit(
    source: Source,
    output: Target,
    max_bytes: Annotated[str | None, typer.Option(help="On disk, such as 60MB or 60MiB.")] = None,
    max_ppl_increase: Annotated[str | None, typer.Option(help="On held-out text, such as 3%.")] = None,
    min_decode_speedup: Annotated[float | None, typer.Option(help="Beside IN in transformers, such as 2.")] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", help="hf, gguf, onnx; may be given again. [default: all]")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What was made and measured is kept there. [default: OUT.fit]")
    ] = None,
    files: Files = None,
    calibration: Calibration = 128,
    held_out: HeldOut = 128,
    sequence_length: SequenceLength = None,
    seed: Annotated[int, typer.Option(help="Of the choice of calibration rows.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the timing. [default: as many as torch takes]")] = None,
    as_json: Json = False,
) -> None:
    """Find the smallest model that keeps a promise, by pruning and quantizing, or say what can't be kept, by how much.

    Run again, it goes on where it was ended.

    Example: `shardlab fit IN OUT --max-bytes 60MB --max-ppl-increase 3% --min-decode-speedup 2`
    """
    from dataclasses import asdict

    from shardlab.export.fit import PACKS, FitConfig, why_refused
    from shardlab.export.fit import fit as run
    from shardlab.export.promise import front, parse_promise, table

    promise = parse_promise(max_bytes, max_ppl_increase, min_decode_speedup)
    data = _data(source, output, files, sequence_length)
    config = FitConfig(promise, tuple(formats or PACKS), calibration=calibration, held_out=held_out, seed=seed)
    config = replace(config, threads=threads)
    found = run(source, output, work or output.with_name(f"{output.name}.fit"), config, data, to_stderr)
    if as_json:
        best = None if found.best is None else asdict(found.best)
        typer.echo(json.dumps({"best": best, "front": [asdict(one) for one in front(found.tried)]}))
    else:
        typer.echo("\n".join(table(found.tried, promise)))
    if found.best is None:
        raise UserError(why_refused(found, promise))
    if not as_json:
        typer.echo(f"{found.best.line()}\nmodel: {output}")


def _rows(
    source: Path,
    output: Path,
    files: list[str] | None,
    sequence_length: int | None,
    calibration: int,
    held_out: int,
    seed: int,
) -> tuple[Any, int]:
    """(rows, tokens of one); before they are read, that there is a model to start from and room for the result."""
    from shardlab.compress.stage import read_rows

    data = _data(source, output, files, sequence_length)
    return read_rows(data, calibration=calibration, held_out=held_out, seed=seed), data.sequence_length


def _data(source: Path, output: Path, files: list[str] | None, sequence_length: int | None) -> Any:
    from shardlab.compress.stage import refuse_existing, source_config
    from shardlab.recipe import DataSection

    refuse_existing(output)
    positions = source_config(source).get("max_position_embeddings", DEFAULT_LENGTH)
    length = sequence_length or min(DEFAULT_LENGTH, positions)
    return DataSection(files=tuple(files or ()), tokenizer=str(source.absolute()), sequence_length=length)


def read_rows_for(data: Any, calibration: int, held_out: int) -> tuple[Any, int]:
    """(rows of a recipe's data, tokens of one)."""
    from shardlab.compress.stage import read_rows

    return read_rows(data, calibration=calibration, held_out=held_out), data.sequence_length


def _say(output: Path, figures: Mapping[str, Any], speed: Mapping[str, Any], as_json: bool) -> None:
    from shardlab.compress.summary import bits_lines, quality_lines, size_line
    from shardlab.export.speed import speed_lines

    if as_json:
        typer.echo(json.dumps({**figures, **speed}))
        return
    lines = [*quality_lines(figures), *bits_lines(figures), size_line(figures), *(speed_lines(speed) if speed else [])]
    typer.echo("\n".join([*lines, f"model: {output}"]))
