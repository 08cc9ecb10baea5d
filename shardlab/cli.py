"""The commands: parse, call, print. Heavy libraries are imported inside the commands, so that `--help` is quick."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlab import __version__

app = typer.Typer(
    name="shardlab",
    help="Train a model that does not fit, on the machines you have; then shrink it until it does.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file; see `shardlab init`.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Override one value of the recipe; may be given again."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="The run's directory. [default: runs/NAME]")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout; the rest goes to stderr.")]


def main() -> None:
    """The program. Ends the process with the exit codes of `errors.ExitCode`."""
    from shardlab.runtime.child import run_rank

    sys.exit(run_rank(lambda: app(standalone_mode=True)))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardlab {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    local_rank: Annotated[
        int, typer.Option("--local_rank", "--local-rank", hidden=True, help="What `deepspeed` adds; not needed.")
    ] = 0,
) -> None:
    del version, local_rank


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe with every key, its default and what it does.

    Example: `shardlab init my.yaml && shardlab train my.yaml --nproc 2`
    """
    from shardlab.recipe.template import write_template

    write_template(path)
    typer.echo(f"wrote {path}; next: shardlab train {path}")


@app.command()
def train(
    recipe: RecipeFile,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here; under another launcher, the ranks to expect.")
    ] = None,
    overrides: Overrides = None,
    output: Output = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|DIR", help="Go on from the newest whole checkpoint of --output, or of DIR."),
    ] = None,
    reset_schedule: Annotated[
        bool, typer.Option("--reset-schedule", help="With --resume: the recipe's schedule from there on.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="After a failure start the ranks again and resume, so many times.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve and print everything, train nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe.

    TERM or USR1 to any rank saves a checkpoint after the step under way and ends with code 75; a second one aborts.

    Examples: `shardlab train recipe.yaml --nproc 2`, `shardlab train recipe.yaml --set train.steps=50`,
    `torchrun --nproc-per-node 2 -m shardlab train recipe.yaml --output runs/a`,
    `shardlab train recipe.yaml --output runs/a --resume auto --nproc 4 --set shard.backend=zero3`
    """
    from shardlab.errors import UserError
    from shardlab.recipe import load_recipe
    from shardlab.train.start import check, default_output, start

    loaded = load_recipe(recipe, overrides or ())
    if dry_run:
        _print_plan(loaded, check(loaded, nproc or loaded.shard.world_size or 1), as_json)
        return
    if resume == "auto" and output is None:
        raise UserError("--resume auto needs --output: the run to go on with")
    if reset_schedule and resume is None:
        raise UserError("--reset-schedule is for a run that goes on: give --resume too")
    directory = output if output is not None else default_output(recipe)

    def run() -> None:
        from shardlab.train.run import train as train_here

        summary = train_here(
            loaded,
            directory,
            world_size=nproc,
            resume=resume,
            reset_schedule=reset_schedule,
            say=_to_stderr if as_json else typer.echo,
        )
        if as_json and summary is not None:
            typer.echo(json.dumps(summary))

    arguments = ["train", str(recipe), "--output", str(directory), *(f"--set={o}" for o in overrides or ())]
    arguments += [f"--nproc={nproc}"] if nproc is not None else []
    arguments += [f"--resume={resume}"] if resume is not None else []
    arguments += ["--reset-schedule"] if reset_schedule else []
    arguments += ["--json"] if as_json else []
    code = start(loaded, nproc, directory, arguments, run, resume=resume, max_restarts=max_restarts)
    raise typer.Exit(code or 0)


@app.command()
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe, a YAML file; or give --model.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A model directory or config.json, instead of a recipe's model.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence, instead of the recipe's.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "--world-size", min=1, help="Ranks. [default: the hardware's, or 1]")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="NxNAME", help="Such as 8xH100-80G. [default: this machine]")
    ] = None,
    hardware_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON file with more hardware to name.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every micro-batch, not only the largest that fits.")] = False,
    as_json: Json = False,
) -> None:
    """The ways to train a model on given machines: predicted memory by kind, what fits, and which to take.

    Needs no GPU and reads no weights.

    Examples: `shardlab plan recipe.yaml --nproc 2`, `shardlab plan recipe.yaml --hardware 8xH100-80G`,
    `shardlab plan --model my-model --seq 4096 --hardware 8xA100-80G --json`
    """
    from shardlab.planner import show
    from shardlab.planner.survey import survey_for

    found = survey_for(recipe, overrides or (), model, seq, nproc, hardware, hardware_file)
    typer.echo(json.dumps(show.as_dict(found)) if as_json else show.text(found, every=every))


@app.command()
def compare(
    recipe: RecipeFile,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks of each sharded run.")] = 2,
    backends: Annotated[
        str | None, typer.Option(help="Which, separated by commas. [default: ddp,zero1,zero2,zero3,fsdp]")
    ] = None,
    overrides: Overrides = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train the same recipe on one process and on each backend, and show that the losses agree.

    Example: `shardlab compare recipe.yaml --nproc 2 --set train.steps=20`
    """
    from shardlab.recipe import load_recipe
    from shardlab.train import compare as comparing
    from shardlab.train.start import default_output

    loaded = load_recipe(recipe, overrides or ())
    chosen = comparing.parse_backends(backends)
    rows = list(comparing.compare(loaded, nproc, output or default_output(recipe), chosen))
    typer.echo(json.dumps([vars(row) for row in rows]) if as_json else comparing.table(rows))


@app.command(name="eval")
def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model directory.")],
    files: Annotated[
        list[str] | None, typer.Option(help="Held-out text files or globs. [default: the standard library's split]")
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 256,
    packing: Annotated[bool, typer.Option(help="Several documents in a row, or one, cut at its end.")] = True,
    as_json: Json = False,
) -> None:
    """Loss and perplexity of a model on held-out text.

    Example: `shardlab eval runs/demo/model --files 'notes/*.txt'`
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
    result = evaluate_directory(directory, data)
    text = "loss {loss:.4f}  perplexity {perplexity:.2f}  over {tokens:,} tokens".format(**result)
    typer.echo(json.dumps(result) if as_json else text)


@app.command()
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


@app.command()
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


data_app = typer.Typer(help="Look at the data of a recipe.", no_args_is_help=True, rich_markup_mode="markdown")
app.add_typer(data_app, name="data")


@data_app.command()
def inspect(
    recipe: RecipeFile,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show as the model gets them.")] = 3,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Show decoded rows with what is not learned marked, the lengths, what packing saves, and every bad record's place.

    Ends with code 2 if training would refuse the records.

    Examples: `shardlab data inspect recipe.yaml --rows 5`,
    `shardlab data inspect recipe.yaml --set data.on_bad_record=skip --json`
    """
    from shardlab.data.inspection import inspect_data
    from shardlab.errors import UserError
    from shardlab.recipe import load_recipe

    found = inspect_data(load_recipe(recipe, overrides or ()).data, rows)
    if as_json:
        typer.echo(json.dumps(found.as_dict()))
    else:
        typer.echo(found.text(_dim) if sys.stdout.isatty() else found.text())
    if found.refusal is not None:
        raise UserError(found.refusal)


checkpoint_app = typer.Typer(
    help="Look at the checkpoints of a run, and verify them.", no_args_is_help=True, rich_markup_mode="markdown"
)
app.add_typer(checkpoint_app, name="checkpoint")

Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint; or a run, whose newest one is meant.")]


@checkpoint_app.command(name="list")
def list_checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")], as_json: Json = False
) -> None:
    """The checkpoints of a run: step, size, what saved them, evaluation loss.

    Example: `shardlab checkpoint list runs/demo`
    """
    import dataclasses

    from shardlab.checkpoint.inspect import rows

    found = rows(run)
    typer.echo(
        json.dumps([dataclasses.asdict(row) for row in found]) if as_json else "\n".join(r.text() for r in found)
    )


@checkpoint_app.command(name="inspect")
def inspect_checkpoint(directory: Checkpoint, as_json: Json = False) -> None:
    """What a checkpoint holds: tensors with shapes and types, optimizer state, schedule, cursor, what wrote it.

    Example: `shardlab checkpoint inspect runs/demo/checkpoints/step-00000100`
    """
    from shardlab.checkpoint.inspect import as_dict, chosen, describe

    path = chosen(directory)
    typer.echo(json.dumps(as_dict(path)) if as_json else "\n".join(describe(path)))


@checkpoint_app.command(name="verify")
def verify_checkpoints(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run, all of whose checkpoints are read, or one.")],
    as_json: Json = False,
) -> None:
    """Read every byte and compare it with what was written.

    Ends with code 2 if anything is damaged, and names it.

    Example: `shardlab checkpoint verify runs/demo`
    """
    from shardlab.checkpoint.inspect import verify_all
    from shardlab.errors import UserError

    found = verify_all(directory)
    if as_json:
        typer.echo(json.dumps(found))
    faults = [fault for row in found for fault in row["faults"]]
    if faults:
        damaged = sum(bool(row["faults"]) for row in found)
        raise UserError(f"{damaged} of {len(found)} checkpoints damaged: {'; '.join(faults)}")
    if not as_json:
        typer.echo("\n".join(f"{row['path']}: whole" for row in found))


@checkpoint_app.command(name="export")
def export_checkpoint(
    directory: Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    dtype: Annotated[str, typer.Option(help="auto (what the run computed in), bf16 or fp32.")] = "auto",
    like: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A model directory to take config and tokenizer from.")
    ] = None,
) -> None:
    """Write a checkpoint's model as a Hugging Face directory (of a run with adapters: an adapter directory).

    Example: `shardlab checkpoint export runs/demo model --dtype bf16`
    """
    from shardlab.checkpoint.export import export, parse_dtype
    from shardlab.checkpoint.inspect import chosen

    export(chosen(directory), output, parse_dtype(dtype), like)
    typer.echo(f"model: {output}")


@checkpoint_app.command(name="convert")
def convert_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="A checkpoint of DeepSpeed ZeRO (stages 0 to 3) or PyTorch DCP, a model directory; with --to, ours.",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Where to make the checkpoint, in a new directory.")],
    to: Annotated[
        str | None,
        typer.Option(metavar="dcp|zero3", help="Write another tool's checkpoint: PyTorch DCP's, or ZeRO-3's."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(metavar="N", help="With --to zero3: how many ranks load it.")
    ] = None,
) -> None:
    """Another tool's checkpoint as one of ours, to go on from at any backend and world size; or ours as another's.

    Nothing that a file brings is run.

    Example: `shardlab checkpoint convert deepspeed-run converted`, then `shardlab train recipe.yaml --resume converted
    --reset-schedule`; and back: `shardlab checkpoint convert runs/demo deepspeed-run --to zero3 --world-size 2`
    """
    from shardlab.checkpoint.convert import convert
    from shardlab.checkpoint.convert_to import convert_to
    from shardlab.checkpoint.inspect import chosen
    from shardlab.errors import UserError

    if to is None and world_size is not None:
        raise UserError("--world-size is of --to zero3: a checkpoint of ours goes on at any number of ranks")
    if to is None:
        typer.echo(f"checkpoint: {convert(source, output)}")
        return
    convert_to(chosen(source), output, to, world_size)
    typer.echo(f"checkpoint: {output}")


@checkpoint_app.command(name="diff")
def diff_checkpoints(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a run.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """Which tensors of two checkpoints differ, and by how much; how they are sharded does not matter.

    Ends with code 1 if anything differs, as `diff` does.

    Example: `shardlab checkpoint diff runs/a runs/b`
    """
    from shardlab.checkpoint.diff import differences
    from shardlab.checkpoint.inspect import chosen

    found = list(differences(chosen(first), chosen(second)))
    if as_json:
        typer.echo(json.dumps([difference.as_dict() for difference in found]))
    else:
        typer.echo("\n".join(difference.text() for difference in found) or "the same, bit for bit")
    raise typer.Exit(1 if found else 0)


@app.command()
def doctor(
    ds_config: Annotated[
        Path | None, typer.Option("--ds-config", metavar="FILE", help="Lint this DeepSpeed JSON; nothing is run.")
    ] = None,
    accelerate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lint this accelerate file, alone or with --ds-config.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model (or its config.json) that the files are used with.")
    ] = None,
    parity: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Run two configurations on a tiny model: do they compute the same?"),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks that the files are for, to check batch sizes.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="An unknown key, or a glob of some, that is meant.")
    ] = None,
    self_test: Annotated[bool, typer.Option(help="Train a step on two ranks with every backend.")] = True,
    as_json: Json = False,
) -> None:
    """What is wrong with this machine, with a configuration file, or between two configurations.

    Ends with code 1 if a check fails or the two differ, with 2 if a file has errors.

    Examples: `shardlab doctor`, `shardlab doctor --ds-config ds.json --accelerate acc.yaml --model my-model`,
    `shardlab doctor --parity recipe.yaml ds.json`
    """
    from shardlab.doctor import report

    if parity is not None:
        code = report.compare(*parity, model, as_json=as_json, say=typer.echo)
    elif ds_config is not None or accelerate is not None:
        code = report.lint(ds_config, accelerate, model, nproc, allow or (), as_json=as_json, say=typer.echo)
    else:
        code = report.examine(self_test=self_test, as_json=as_json, say=typer.echo)
    raise typer.Exit(code)


def _dim(text: str) -> str:
    return typer.style(text, dim=True)


def _to_stderr(text: str) -> None:
    typer.echo(text, err=True)


def _print_plan(recipe: Any, plan: Any, as_json: bool) -> None:
    import dataclasses

    from shardlab.planner import describe
    from shardlab.recipe import dump_recipe

    if as_json:
        typer.echo(json.dumps({"recipe": recipe.model_dump(mode="json"), "plan": dataclasses.asdict(plan)}))
    else:
        typer.echo(f"{dump_recipe(recipe)}\n{describe(plan)}")
