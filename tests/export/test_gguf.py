"""GGUF: what is in the file, what llama.cpp makes of it, what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardlab.data.tokenizer import make_tokenizer
from shardlab.errors import UserError
from shardlab.export import gguf as gguf_export
from shardlab.export import gguf_families
from shardlab.export.gguf import export_gguf
from shardlab.export.gguf_check import BOUNDS, ExportCheckError
from shardlab.export.gguf_file import GgufDtype
from shardlab.export.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, rebuild
from shardlab.export.llama_cpp import LlamaCpp
from tests.export.models import CONFIGS, END, TEXT, bpe_tokenizer, needs, save_model
from tests.train.support import shardlab

DTYPES: tuple[GgufDtype, ...] = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")


@pytest.fixture(autouse=True)
def _libraries() -> None:
    needs("gguf", "cyllama")


def fields(path: Path) -> dict[str, object]:
    """The metadata, as the gguf package reads it."""
    import gguf

    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", name, bpe_tokenizer(280), 320)
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f32")
    assert done.agreement is not None
    # GPT-2's GELU comes from a table of f16 there.
    assert done.agreement.error < (BOUNDS["f32"] if name == "gpt2" else 1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_against_the_original_model(dtype: GgufDtype, tmp_path: Path) -> None:
    """Not only against the file's own weights: the loss in quality is bounded too, for random weights."""
    model = save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype)
    assert done.agreement is not None
    assert done.agreement.error <= BOUNDS[dtype]
    tokens = list(range(3, 43))
    runtime = LlamaCpp(tmp_path / "model.gguf", context=64, exact=True)
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    error = np.linalg.norm(runtime.logits(tokens) - wanted) / np.linalg.norm(wanted)
    runtime.close()
    assert error < {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "q8_0": 5e-2, "q4_0": 0.3, "q4_1": 0.3}[dtype]


def test_query_rows_in_a_wrong_order_fail_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    wrong = dataclasses.replace(gguf_families._FAMILIES["llama"], interleaved=False)
    monkeypatch.setitem(gguf_families._FAMILIES, "llama", wrong)
    with pytest.raises(ExportCheckError, match=r"llama\.cpp's logits are 0\.[3-9]"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", "q4_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_value_that_changed_on_the_way_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    write = gguf_export.write_gguf

    def damaged(path: Path, *rest: object) -> None:
        write(path, *rest)  # type: ignore[arg-type]
        data = bytearray(path.read_bytes())
        data[-3] ^= 0x40
        path.write_bytes(data)

    monkeypatch.setattr(gguf_export, "write_gguf", damaged)
    with pytest.raises(ExportCheckError, match="reads back with other values"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f32")
    assert not (tmp_path / "model.gguf").exists()


def test_greedy_tokens_of_a_trained_model(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(300)
    model = save_model(tmp_path / "model", "llama", tokenizer, len(tokenizer))
    ids = tokenizer(TEXT * 4, return_tensors="pt")["input_ids"][:, :64]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.5, "learned by heart, or greedy tokens would mean nothing"
    model.save_pretrained(tmp_path / "model")
    prompt = ids[0, :5].tolist()
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=-1)[0].tolist()
    for dtype in ("f32", "q8_0"):
        export_gguf(tmp_path / "model", tmp_path / f"{dtype}.gguf", dtype)
        runtime = LlamaCpp(tmp_path / f"{dtype}.gguf", context=64)
        tokens = list(prompt)
        logits = runtime.extend(prompt, 0)
        while len(tokens) < len(wanted):
            tokens.append(int(logits.argmax()))
            logits = runtime.extend(tokens[-1:], len(tokens) - 1)
        runtime.close()
        assert tokens == wanted


def test_rows_that_have_no_token_are_marked_unused(tmp_path: Path) -> None:
    """Field case B66: a padded vocabulary."""
    tokenizer = bpe_tokenizer(300, added=("<tab>",))
    tokens = len(tokenizer)
    save_model(tmp_path / "model", "llama", tokenizer, tokens + 3)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    found = fields(tmp_path / "model.gguf")
    texts, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert isinstance(texts, list)
    assert isinstance(kinds, list)
    assert len(texts) == len(kinds) == found["llama.vocab_size"] == tokens + 3
    assert kinds[tokens:] == [UNUSED] * 3
    assert kinds[tokenizer.eos_token_id] == CONTROL
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert kinds[texts.index("<tab>")] == USER_DEFINED
    assert kinds.count(NORMAL) == tokens - 2
    import json

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]


def test_as_many_rows_as_tokens(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(300)
    save_model(tmp_path / "model", "llama", tokenizer, len(tokenizer))
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    assert UNUSED not in fields(tmp_path / "model.gguf")["tokenizer.ggml.token_type"]  # type: ignore[operator]


def test_more_tokens_than_rows_are_refused_naming_both(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(300)
    save_model(tmp_path / "model", "llama", tokenizer, len(tokenizer) - 2)
    with pytest.raises(
        UserError, match=rf"has {len(tokenizer)} tokens, the model's embedding {len(tokenizer) - 2} rows"
    ):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")


def test_an_embedding_with_fewer_rows_than_the_config_says_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:300].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"embed_tokens.* fewer rows"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_our_bytes_tokenizer(tmp_path: Path) -> None:
    """No merges at all, which llama.cpp refuses; and the bytes 0 and 1 side by side stay two tokens."""
    tokenizer = make_tokenizer("bytes", None, tmp_path)  # type: ignore[arg-type]
    save_model(tmp_path / "model", "qwen2", tokenizer, 320)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    runtime = LlamaCpp(tmp_path / "model.gguf", context=8)
    assert runtime.tokenize("\x00\x01é") == [0, 1, 0xC3, 0xA9]
    runtime.close()


def test_the_tokenizer_comes_back_from_the_file(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(300, added=("<tab>",))
    save_model(tmp_path / "model", "gpt2", tokenizer, 320)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    again = rebuild(fields(tmp_path / "model.gguf"))
    text = TEXT + "<tab>x" + END + "  é\n"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert again.eos_token_id == tokenizer.eos_token_id
    assert again.get_vocab() == tokenizer.get_vocab()  # without the rows that have no token


def test_matrices_that_blocks_do_not_divide_stay_f16(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320, intermediate_size=88)
    done = export_gguf(tmp_path / "model", tmp_path / "model.gguf", "q4_0")
    assert done.wider == ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")
    assert "2 matrices, blk.0.ffn_down.weight first" in done.text()


def test_what_the_format_does_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(280)
    cases = {
        "gpt_neox": (
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
            "not model_type gpt_neox",
        ),
        "llama": ({**CONFIGS["llama"][1], "hidden_act": "gelu"}, "hidden_act silu, not gelu"),
        "qwen2": (
            {**CONFIGS["qwen2"][1], "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "can't keep rope_type dynamic",
        ),
    }
    for kind, (values, message) in cases.items():
        CONFIGS[f"refused-{kind}"] = (kind, values)
        try:
            save_model(tmp_path / kind, f"refused-{kind}", tokenizer, 320)
        finally:
            del CONFIGS[f"refused-{kind}"]
        with pytest.raises(UserError, match=message):
            export_gguf(tmp_path / kind, tmp_path / "model.gguf", "f16")


def test_a_value_that_f16_can_not_hold_is_refused_by_name(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"blk\.1\.ffn_up\.weight .* not finite in f16"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", "q8_0")


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "mistral", bpe_tokenizer(280), 320)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    assert fields(tmp_path / "model.gguf")["llama.context_length"] == 48


def test_the_command(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", bpe_tokenizer(280), 320)
    output = tmp_path / "model.gguf"
    done = shardlab("export", str(tmp_path / "model"), str(output), "--to", "gguf", "--dtype", "q8_0")
    assert done.code == 0
    assert "every value read back" in done.out
    assert "llama.cpp beside transformers: logits" in done.out
    again = shardlab("export", str(tmp_path / "model"), str(output), "--to", "gguf")
    assert again.code == 2
    assert "never overwritten" in again.err
    wrong = shardlab("export", str(tmp_path / "model"), str(tmp_path / "x.gguf"), "--to", "gguf", "--dtype", "int3")
    assert wrong.code == 2
    assert "choose one of f32, f16, bf16, q8_0, q4_0, q4_1" in wrong.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 320
