"""`shardlab fit`: one promise over bytes, perplexity and speed, kept by the smallest of many models, or refused.

The ladder: channels of the MLPs go (or none), then the weights are rounded and packed in one of the formats. Each
candidate is made by the stage that a command of its own would run, judged on the same held-out rows, and kept with its
figures in a directory beside, so that a search which was ended goes on. Only what keeps bytes and perplexity is timed,
the smallest first.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shardlab.compress.card import FILE as CARD
from shardlab.compress.card import read_card, weight_bytes
from shardlab.compress.prune import PruneConfig, prune
from shardlab.compress.quantize import QuantizeConfig, quantize
from shardlab.compress.stage import Rows, Say, output_directory, read_rows, refuse_existing
from shardlab.compress.walk import Segment, Walk
from shardlab.errors import UserError
from shardlab.export.artifact import artifact_bytes, evaluate_artifact
from shardlab.export.gguf import export_gguf
from shardlab.export.gguf_file import parse_dtype
from shardlab.export.onnx import export_onnx
from shardlab.export.onnx_weights import parse_onnx_dtype
from shardlab.export.promise import Promise, Tried, front, picture, refusal
from shardlab.export.speed import SpeedConfig, measure_speed
from shardlab.recipe import DataSection

SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)  # of the channels that go
PACKS = {
    "hf": ("int8", "int6", "int5", "int4g32", "int3g32"),
    "gguf": ("q8_0", "q4_1", "q4_0"),
    "onnx": ("int8", "int8g32", "int4"),
}
GGUF_FILE = "model.gguf"  # in the directory that is written
_RESULTS, _SETTINGS, _PICTURE = "tried.jsonl", "settings.json", "shardlab_fit.svg"


@dataclass(frozen=True)
class FitConfig:
    """What is searched, and by which text it is judged."""

    promise: Promise
    formats: tuple[str, ...] = ("hf", "gguf", "onnx")
    shares: tuple[float, ...] = SHARES
    calibration: int = 128
    held_out: int = 128
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True)
class Fitted:
    """What was found. `best` is None where nothing keeps the promise."""

    tried: list[Tried]
    best: Tried | None
    picture: Path


@dataclass
class _Search:
    source: Path
    work: Path
    config: FitConfig
    data: DataSection
    rows: Rows
    say: Say
    tried: dict[str, Tried] = field(default_factory=dict)
    base_loss: float = 0.0

    @property
    def length(self) -> int:
        return self.data.sequence_length

    def keep(self, one: Tried) -> Tried:
        """In the file too."""
        self.tried[one.name] = one
        with (self.work / _RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")
        self.say(one.line())
        return one


def fit(source: Path, output: Path, work: Path, config: FitConfig, data: DataSection, say: Say) -> Fitted:
    """Search, and write the smallest that keeps the promise to `output`, a directory.

    `work` keeps what was made and measured. Raises UserError where it is of another search. Nothing is written to
    `output` where no candidate keeps the promise.
    """
    refuse_existing(output)
    for name in config.formats:
        if name not in PACKS:
            raise UserError(f"--format {name}: choose of {', '.join(PACKS)}")
    _begin(source, work, config, data)
    rows = read_rows(data, calibration=config.calibration, held_out=config.held_out, seed=config.seed)
    search = _Search(source, work, config, data, rows, say)
    _read_kept(search)
    for share in config.shares:
        pruned = _pruned(search, share)
        if pruned is None:
            break
        for kind in config.formats:
            for pack in PACKS[kind]:
                _candidate(search, pruned, share, kind, pack)
    if not search.tried:
        raise UserError("no candidate could be made: what stood in the way is said above")
    best = _fast_enough(search)
    drawn = work / _PICTURE
    tried = list(search.tried.values())
    drawn.write_text(picture(tried, config.promise, f"{source.name}: {config.promise.text()}"), encoding="utf-8")
    if best is not None:
        _write(search, best, output)
    return Fitted(tried, best, drawn)


def why_refused(fitted: Fitted, promise: Promise) -> str:
    """For the error."""
    return f"{refusal(promise, fitted.tried)}. The picture: {fitted.picture}"


def _begin(source: Path, work: Path, config: FitConfig, data: DataSection) -> None:
    files = {file.name: file.stat().st_mtime_ns for file in sorted(source.glob("*.safetensors"))}
    settings = {
        "source": str(source.resolve()), "files": files, "texts": list(data.files), "length": data.sequence_length,
        "calibration": config.calibration, "held_out": config.held_out, "seed": config.seed, "threads": config.threads,
    }  # fmt: skip
    path = work / _SETTINGS
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != settings:
            raise UserError(f"{work} is of another search (model, text or rows differ): remove it, or give --work")
        return
    if work.exists():
        raise UserError(f"{work} exists and is no search's: give --work")
    work.mkdir(parents=True)
    path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _read_kept(search: _Search) -> None:
    results = search.work / _RESULTS
    if results.is_file():
        for line in results.read_text(encoding="utf-8").splitlines():
            one = Tried(**json.loads(line))
            search.tried[one.name] = one
    file = search.work / "original.json"
    if not file.is_file():
        walk = Walk(search.source, [], search.rows.held_out, sequence_length=search.length)
        for _ in walk.run(_unchanged):
            pass
        assert walk.quality is not None
        file.write_text(json.dumps({"loss": walk.quality.loss_before}), encoding="utf-8")
    search.base_loss = json.loads(file.read_text(encoding="utf-8"))["loss"]


def _unchanged(_segment: Segment) -> Iterator[tuple[str, Tensor]]:
    yield from ()


def _pruned(search: _Search, share: float) -> Path | None:
    """The model without that share of its channels; None where that alone breaks the promise, or can't be."""
    if share == 0:
        return search.source
    path = search.work / f"channels-{share:g}"
    if not path.exists():
        try:
            prune(search.source, path, PruneConfig("channels", share), search.rows, search.length, _quiet)
        except UserError as error:
            search.say(f"no channels: {error}")
            return None
    most = search.config.promise.max_increase
    increase = _increase(search, _loss_in_card(path))
    if most is not None and increase > most:
        search.say(f"{share:.1%} of the channels gone alone: perplexity {increase:+.2%}; no more of them go")
        return None
    return path


def _candidate(search: _Search, pruned: Path, share: float, kind: str, pack: str) -> None:
    name = f"{kind} {pack}" + (f", -{share:.1%} channels" if share else "")
    path = _path(search, name)
    if name in search.tried and path.exists():
        return
    shutil.rmtree(path, ignore_errors=True)
    try:
        loss = _MAKERS[kind](search, pruned, path, pack)
    except UserError as error:
        search.say(f"{name}: left out: {error}")
        return
    file = path / GGUF_FILE if kind == "gguf" else path
    search.keep(Tried(name, artifact_bytes(file), _increase(search, loss)))


def _hf(search: _Search, source: Path, path: Path, pack: str) -> float:
    config = QuantizeConfig(pack, on_indivisible="smaller")
    quantize(source, path, config, search.rows, search.length, _quiet)
    return _loss_in_card(path)


def _gguf(search: _Search, source: Path, path: Path, pack: str) -> float:
    with output_directory(source, path) as partial:
        export_gguf(source, partial / GGUF_FILE, parse_dtype(pack))
    loss: float = evaluate_artifact(path / GGUF_FILE, search.data, rows=search.config.held_out)["loss"]
    return loss


def _onnx(search: _Search, source: Path, path: Path, pack: str) -> float:
    export_onnx(source, path, parse_onnx_dtype(pack))
    loss: float = evaluate_artifact(path, search.data, rows=search.config.held_out)["loss"]
    return loss


_MAKERS: dict[str, Callable[[_Search, Path, Path, str], float]] = {"hf": _hf, "gguf": _gguf, "onnx": _onnx}


def _fast_enough(search: _Search) -> Tried | None:
    """The smallest that keeps the promise, timed where speed is promised."""
    promise = search.config.promise
    untimed = replace(promise, min_decode_speedup=None)
    kept = sorted(
        (t for t in search.tried.values() if not untimed.excess(t)), key=lambda one: (one.bytes, one.increase)
    )
    if promise.min_decode_speedup is None:
        return kept[0] if kept else None
    for one in kept:
        if one.decode_speedup is None:
            config = SpeedConfig(threads=search.config.threads)
            before = measure_speed(search.source, config)
            path = _path(search, one.name)
            after = measure_speed(path / GGUF_FILE if (path / GGUF_FILE).is_file() else path, config)
            speedup = after.decode_tokens_per_second / before.decode_tokens_per_second
            one = search.keep(replace(one, decode_speedup=speedup))
        if not promise.excess(one):
            return one
    return None


def _write(search: _Search, best: Tried, output: Path) -> None:
    """A copy of the candidate, with the account of the search."""
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(_path(search, best.name), partial)
    account = {
        "promise": asdict(search.config.promise),
        "best": asdict(best),
        "original_bytes": weight_bytes(search.source),
        "front": [asdict(one) for one in front(search.tried.values())],
        "tried": [asdict(one) for one in search.tried.values()],
    }
    (partial / "shardlab_fit.json").write_text(json.dumps(account, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(search.work / _PICTURE, partial / _PICTURE)
    refuse_existing(output)
    partial.rename(output)


def _path(search: _Search, name: str) -> Path:
    return search.work / name.replace(", -", "-without-").replace(" ", "-").replace("%", "")


def _increase(search: _Search, loss: float) -> float:
    from math import expm1

    return expm1(loss - search.base_loss)


def _loss_in_card(path: Path) -> float:
    card: dict[str, Any] | None = read_card(path)
    if card is None:
        raise UserError(f"{path} has no {CARD}: remove it")
    loss: float = card["figures"]["loss"]["after"]
    return loss


def _quiet(_text: str) -> None:
    """A stage's progress."""
