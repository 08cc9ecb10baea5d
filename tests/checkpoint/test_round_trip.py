"""What was saved by some ranks in some boxes comes back in any other boxes, bit for bit."""

import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from shardlab.checkpoint import Alone, CheckpointReader, Contents, Ranks, Saver, read_manifest, verify
from shardlab.checkpoint.layout import DTYPES
from shardlab.errors import UserError
from shardlab.state.box import Box, whole
from shardlab.state.fragment import MASTER, Fragment, OptimizerState
from tests.checkpoint.support import cut, fragments_of, on_ranks, same, small_state, succeed, whole_fragments


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, so NaNs and infinities too; every second one is a strided view."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (*shape, dtype.itemsize)
    tensor = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    if seed % 2 and len(shape) > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


@st.composite
def states(draw: st.DrawFn) -> dict[tuple[str, str], Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=4).map(tuple), min_size=1, max_size=4))
    return {
        (f"layer.{n}.weight", MASTER): random_tensor(
            shape, DTYPES[draw(st.sampled_from(sorted(DTYPES)))], draw(st.integers(0, 99))
        )
        for n, shape in enumerate(shapes)
    }


@settings(max_examples=40, deadline=None)
@given(states(), st.integers(1, 3), st.sampled_from([64, 1024]), st.integers(0, 2**32))
def test_any_boxes_on_any_ranks_come_back_in_any_other_boxes(
    state: dict[tuple[str, str], Tensor], world_size: int, file_bytes: int, seed: int
) -> None:
    random_ = random.Random(seed)
    shares: list[dict[tuple[str, str], list[Box]]] = [{key: [] for key in state} for _ in range(world_size)]
    for key, tensor in state.items():
        for box in cut(tuple(tensor.shape), random_.randint(1, 6), random_):
            for rank in random_.sample(range(world_size), random_.randint(1, world_size)):  # some are replicas
                shares[rank][key].append(box)

    def save(ranks: Ranks) -> Path:
        saver = Saver(root, ranks, file_bytes=file_bytes)
        return saver.save(Contents(step=7), lambda: fragments_of(state, shares[ranks.rank]))

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        path = succeed(on_ranks(world_size, save))[0]
        verify(path)
        assert path.name == "step-00000007"
        with CheckpointReader(path) as reader:
            for (name, kind), tensor in state.items():
                for box in cut(tuple(tensor.shape), random_.randint(1, 6), random_):
                    into = torch.zeros([length * 2 for length in box.lengths], dtype=tensor.dtype)
                    into = into[tuple(slice(None, None, 2) for _ in box.lengths)] if seed % 2 else into
                    into = into[tuple(slice(0, length) for length in box.lengths)]
                    reader.read_into(name, kind, box, into)
                    assert same(into, tensor[box.slices])


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    state = small_state()
    path = Saver(tmp_path, file_bytes=700).save(Contents(step=1), whole_fragments(state))
    manifest = read_manifest(path)
    assert len(manifest.files) == 5  # two tensors of 1280 bytes in halves, and what has another element size
    seen: dict[str, Tensor] = {}
    for file in manifest.files:
        with safe_open(path / file.name, "pt") as opened:
            seen |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert same(seen["model.norm.weight|master|0"], state["model.norm.weight", MASTER])
    halves = [seen[f"model.embed.weight|exp_avg|{row},0"] for row in (0, 21)]
    assert same(torch.cat([halves[0], halves[1]]), state["model.embed.weight", "exp_avg"][:42])


def test_everything_but_tensors_comes_back(tmp_path: Path) -> None:
    optimizer = OptimizerState(
        ("exp_avg",),
        {"model.norm.weight": {"step": torch.tensor(3.0)}},  # type: ignore[dict-item]  # as torch's AdamW keeps it
        ({"names": ["model.norm.weight"], "lr": torch.tensor(1e-3), "betas": (0.9, 0.95), "fused": None},),
    )
    contents = Contents(
        step=3,
        optimizer=optimizer,
        aliases={"lm_head.weight": "model.embed.weight"},
        schedule={"name": "cosine", "applied": 3},
        cursor={"sample": 2**53, "epoch": 1},
        recipe={"train": {"steps": 9}},
        plan={"backend": "zero3", "why": ("two", "reasons")},
        versions={"shardlab": "0.1.0"},
        parent="step-00000002",
        evaluation=2.5,
    )
    state = small_state()
    path = Saver(tmp_path).save(contents, whole_fragments(state))
    with CheckpointReader(path) as reader:
        manifest = reader.manifest
        assert reader.optimizer.kinds == ("exp_avg",)
        assert reader.optimizer.scalars == {"model.norm.weight": {"step": 3.0}}
        (group,) = reader.optimizer.groups
        assert group["betas"] == (0.9, 0.95)
        assert group["names"] == ("model.norm.weight",)
        assert group["lr"] == pytest.approx(1e-3)
        assert group["fused"] is None
        assert (manifest.step, manifest.parent, manifest.evaluation) == (3, "step-00000002", 2.5)
        assert (manifest.schedule, manifest.cursor) == (contents.schedule, contents.cursor)
        assert (manifest.recipe, manifest.plan) == (contents.recipe, {"backend": "zero3", "why": ["two", "reasons"]})
        assert manifest.versions["torch"] == torch.__version__
        assert manifest.versions["shardlab"] == "0.1.0"
        assert reader.kinds("lm_head.weight") == {MASTER, "exp_avg"} == reader.kinds("model.embed.weight")
        assert reader.kinds("unknown") == set()
        head = torch.empty(2, 8)
        reader.read_into("lm_head.weight", MASTER, Box((3, 0), (2, 8)), head)
        assert same(head, state["model.embed.weight", MASTER][3:5])


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        (Contents(step=1, plan={"a": {"b": object()}}), r"plan\.a\.b is a object"),
        (Contents(step=1, optimizer=OptimizerState(groups=({"f": print},))), "option f is a builtin"),
    ],
)
def test_what_json_does_not_hold_is_named(tmp_path: Path, contents: Contents, named: str) -> None:
    with pytest.raises(RuntimeError, match=named):
        Saver(tmp_path).save(contents, whole_fragments(small_state()))


def test_values_are_converted_to_the_destination(tmp_path: Path) -> None:
    state = small_state()
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments(state))
    with CheckpointReader(path) as reader:
        into = torch.empty(40, 8, dtype=torch.bfloat16)
        reader.read_into("model.embed.weight", MASTER, Box((0, 0), (40, 8)), into)
        assert same(into, state["model.embed.weight", MASTER].bfloat16())


def test_a_row_range_reads_its_bytes_and_no_more(tmp_path: Path) -> None:
    value = torch.randn(512, 1024)
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments({("w", MASTER): value}))
    with CheckpointReader(path) as reader:
        into = torch.empty(10, 1024)
        reader.read_into("w", MASTER, Box((7, 0), (10, 1024)), into)
        assert reader.bytes_read == into.nbytes
        assert same(into, value[7:17])


def test_a_column_of_a_wide_tensor_is_read_run_by_run(tmp_path: Path) -> None:
    """Rows of 1 MiB, of which 4 KiB are wanted: what lies between is not read."""
    value = torch.randn(4, 1 << 18)
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments({("w", MASTER): value}))
    with CheckpointReader(path) as reader:
        into = torch.empty(4, 1024)
        reader.read_into("w", MASTER, Box((0, 99), (4, 1024)), into)
        assert reader.bytes_read == into.nbytes
        assert same(into, value[:, 99:1123])


def test_what_is_larger_than_the_buffers_is_read_in_blocks(tmp_path: Path) -> None:
    """20 MiB, strided on both sides and converted: several blocks of 8 MiB."""
    value = torch.randn(1 << 11, 2560).t()
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments({("w", MASTER): value}))
    with CheckpointReader(path) as reader:
        into = torch.empty(1 << 11, 2560, dtype=torch.float64).t()
        reader.read_into("w", MASTER, Box((0, 0), (2560, 1 << 11)), into)
        assert same(into, value.double())
        part = torch.empty(2560, 2000)
        reader.read_into("w", MASTER, Box((0, 9), (2560, 2000)), part)
        assert same(part, value[:, 9:2009])


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    """Two ranks that hold everything write about a half each."""
    state = {(f"w{n}", MASTER): torch.randn(100) for n in range(8)}
    succeed(on_ranks(2, lambda ranks: Saver(tmp_path, ranks).save(Contents(step=1), whole_fragments(state))))
    path = tmp_path / "step-00000001"
    sizes = [file.stat().st_size for file in sorted(path.glob("*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) - min(sizes) < 100


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments(small_state()))
    with CheckpointReader(path) as reader:
        with pytest.raises(UserError, match=r"holds no exp_avg of model\.norm\.weight"):
            reader.read_into("model.norm.weight", "exp_avg", Box((0,), (1,)), torch.empty(1))
        with pytest.raises(UserError, match="another model"):
            reader.read_into("model.norm.weight", MASTER, Box((5,), (1,)), torch.empty(1))
        with pytest.raises(UserError, match="another model"):
            reader.read_into("model.norm.weight", MASTER, Box((0, 0), (1, 1)), torch.empty(1, 1))


@pytest.mark.parametrize("missing", [True, False])
def test_fragments_that_are_not_the_whole_state_are_no_checkpoint(tmp_path: Path, missing: bool) -> None:
    """A backend's mistake ends the save, not the resume."""
    value = torch.randn(6, 4)
    boxes = [Box((0, 0), (3, 4)), Box((3, 0), (2, 4)) if missing else Box((2, 0), (4, 4))]
    said = r"\(5, 0\) is missing" if missing else r"\(2, 0\) is there twice"
    with pytest.raises(RuntimeError, match=said):
        Saver(tmp_path).save(Contents(step=1), lambda: fragments_of({("w", MASTER): value}, {("w", MASTER): boxes}))
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_on_a_tensor_are_told(tmp_path: Path) -> None:
    def save(ranks: Ranks) -> Path:
        value = torch.zeros(2 + ranks.rank)
        return Saver(tmp_path, ranks).save(Contents(step=1), whole_fragments({("w", MASTER): value}))

    assert [type(result) for result in on_ranks(2, save)] == [RuntimeError, RuntimeError]


def test_a_fragment_that_is_not_what_it_says(tmp_path: Path) -> None:
    wrong = Fragment("w", MASTER, (4,), Box((0,), (4,)), torch.zeros(3))
    with pytest.raises(RuntimeError, match="data of shape"):
        Saver(tmp_path, Alone()).save(Contents(step=1), lambda: [wrong])
    unknown = Fragment("w", MASTER, (4,), Box((0,), (4,)), torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="complex64"):
        Saver(tmp_path, Alone()).save(Contents(step=1), lambda: [unknown])


def test_an_empty_tensor_and_a_scalar(tmp_path: Path) -> None:
    state = {("empty", MASTER): torch.zeros(0, 3), ("scalar", MASTER): torch.tensor(2.5)}
    path = Saver(tmp_path).save(Contents(step=1), whole_fragments(state))
    assert whole((0, 3)) is None
    with CheckpointReader(path) as reader:
        into = torch.zeros(())
        reader.read_into("scalar", MASTER, Box((), ()), into)
        assert into == 2.5
        assert reader.names() == ["scalar"]
