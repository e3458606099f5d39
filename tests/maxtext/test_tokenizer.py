"""Text to ids and back: no character lost, the begin token once, every end token known, no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kv_common.errors import ConfigError, RequestError
from maxtext_paged.convert import find_packaged_gguf
from maxtext_paged.convert.gguf import GgufFile
from maxtext_paged.convert.vocabulary import write_tokenizer_files
from maxtext_paged.tokenizer import HfTokenizer

ROOT = Path(__file__).parents[2]
TEXTS = [
    "The tides are high.",
    "  two  spaces\n\n\ttab",
    "naïve café",
    "👩‍👩‍👧 family 🎉",
    "東京都に住んでいます",
    "zażółć gęślą jaźń",
    "",
]


@pytest.fixture(scope="module")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer files, made from the weights package without converting any weights."""
    try:
        source = find_packaged_gguf()
    except ConfigError as error:
        pytest.skip(f"no SmolLM2 vocabulary: {error}")
    directory = tmp_path_factory.mktemp("smollm2")
    write_tokenizer_files(GgufFile(source), directory)
    return directory


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> HfTokenizer:
    return HfTokenizer.from_dir(smollm2_dir)


def words(directory: Path, tokenizer_config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A word-level tokenizer directory: ``<s>`` 0, ``</s>`` 1, ``<pad>`` 2, ``hello`` 3, ``world`` 4, ``<end>`` 5."""
    directory.mkdir(exist_ok=True)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, "hello": 3, "world": 4, "<end>": 5, "a": 6}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", "<end>"])
    if post_processor := files.pop("post_processor", None):
        tokenizer.post_processor = post_processor
    files.pop("prepare", lambda _: None)(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in {"tokenizer_config": tokenizer_config, **files}.items():
        if value is not None:
            (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


BOS_FIRST = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
BOS_AND_EOS = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


# Characters


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip_through_ids(text, smollm2):
    assert smollm2.decode(smollm2.encode(text)) == text


# Unassigned and private planes are left out: SmolLM2's vocabulary has no token for the bytes they start with.
@given(st.text(st.characters(exclude_categories=["Cs", "Cn", "Co", "Cc"], exclude_characters="<"), max_size=40))
def test_any_text_survives_a_round_trip_through_ids(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.parametrize("character", ["👩", "🫠", "鬱"])
def test_a_character_cut_in_the_middle_is_marked_not_dropped(character, smollm2):
    ids = smollm2.encode(f"end {character}")
    whole = len(smollm2.encode("end"))
    assert len(ids) > whole + 1, "it must take several tokens for this test to mean anything"
    assert smollm2.decode(ids) == f"end {character}"
    for cut in range(whole + 1, len(ids)):
        text = smollm2.decode(ids[:cut])
        assert text.rstrip("\N{REPLACEMENT CHARACTER}") in ("end ", "end") and text.endswith(
            "\N{REPLACEMENT CHARACTER}"
        )


@pytest.mark.parametrize("text", ["  12  34", "x² ½ 12", "in 2018-01-22"])
def test_every_digit_is_split_off_before_anything_else(text, smollm2):
    """llama.cpp's rule for "smollm": first ``\\p{N}``, then GPT-2's pattern."""
    apart = [piece for piece in re.split(r"([0-9²½])", text) if piece]
    assert smollm2.encode(text) == [i for piece in apart for i in smollm2.encode(piece)]


def byte_fallback_tokenizer() -> Tokenizer:
    """As in Llama-2: letters, and byte pieces ``<0xEA>`` for everything else."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for character in "▁abcdefghijklmnopqrstuvwxyz":
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("text", ["한국어 문장", "zażółć gęślą jaźń", "ok 👍"])
def test_byte_pieces_are_joined_to_characters(text):
    tokenizer = HfTokenizer.wrap(byte_fallback_tokenizer())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[:-1]).endswith("\N{REPLACEMENT CHARACTER}") or ord(text[-1]) < 128


def test_special_tokens_stay_in_the_ids_and_out_of_the_text(smollm2):
    ids = smollm2.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"


def test_a_numpy_array_of_ids_is_decoded(smollm2):
    assert smollm2.decode(np.array(smollm2.encode("hello"), np.int32)) == "hello"


def test_text_that_is_not_text_is_refused_for_its_row(smollm2):
    with pytest.raises(RequestError, match="must be text, not int"):
        smollm2.encode(5)


# Begin and end tokens


@pytest.mark.parametrize(
    ("post_processor", "config", "expected"),
    [
        (None, TOKENS, []),
        (None, TOKENS | {"add_bos_token": True}, [0]),
        (BOS_FIRST, TOKENS, [0]),
        (BOS_FIRST, TOKENS | {"add_bos_token": True}, [0]),
        (BOS_FIRST, TOKENS | {"add_bos_token": False}, []),
        (BOS_AND_EOS, TOKENS, [0]),
        (BOS_AND_EOS, TOKENS | {"add_eos_token": True}, [0]),
        (BOS_FIRST, {}, [0]),
    ],
)
def test_a_prompt_gets_the_begin_token_its_tokenizer_uses_and_never_an_end_token(
    post_processor, config, expected, tmp_path
):
    tokenizer = HfTokenizer.from_dir(words(tmp_path / "t", config, post_processor=post_processor))
    assert tokenizer.encode("hello world") == [*expected, 3, 4]
    assert tokenizer.encode("<s> hello world") == [0, 3, 4], "written out by the caller: not doubled"
    assert tokenizer.encode("") == expected


@pytest.mark.parametrize("post_processor", [None, BOS_FIRST])
def test_an_explicit_wish_about_the_begin_token_wins(post_processor, tmp_path):
    directory = words(tmp_path / "t", TOKENS, post_processor=post_processor)
    assert HfTokenizer.from_dir(directory, add_bos=True).encode("hello") == [0, 3]
    assert HfTokenizer.from_dir(directory, add_bos=False).encode("hello") == [3]


@pytest.mark.parametrize(
    ("generation", "model", "passed", "expected"),
    [
        (None, None, (), {1}),
        ({"eos_token_id": 5}, None, (), {1, 5}),
        ({"eos_token_id": [5, 2]}, {"eos_token_id": 4}, (), {1, 5, 2, 4}),
        ({"eos_token_id": None}, {"eos_token_id": [1]}, 3, {1, 3}),
        ({"eos_token_id": [1, 3]}, {}, [5], {1, 3, 5}),
    ],
)
def test_end_tokens_are_the_union_of_all_that_name_one(generation, model, passed, expected, tmp_path):
    directory = words(tmp_path / "t", TOKENS, generation_config=generation, config=model)
    tokenizer = HfTokenizer.from_dir(directory, eos_ids=passed)
    assert tokenizer.eos_ids == expected
    assert tokenizer.eos_id == 1, "the tokenizer's own comes first"


def test_special_tokens_may_be_published_as_objects(tmp_path):
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": {"content": "</s>", "normalized": False},
        "pad_token": None,
        "add_bos_token": True,
    }
    tokenizer = HfTokenizer.from_dir(words(tmp_path / "t", config))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    assert tokenizer.encode("hello") == [0, 3]


def test_an_older_special_tokens_map_is_read_and_the_config_wins_over_it(tmp_path):
    older = {"bos_token": {"content": "<s>"}, "eos_token": "<end>"}
    tokenizer = HfTokenizer.from_dir(words(tmp_path / "t", {"eos_token": "</s>"}, special_tokens_map=older))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_without_any_end_token_there_is_none(tmp_path):
    tokenizer = HfTokenizer.from_dir(words(tmp_path / "t"))
    assert tokenizer.eos_id is None and tokenizer.eos_ids == frozenset()


# Files


@pytest.mark.parametrize(
    ("name", "content", "words_"),
    [
        ("tokenizer.json", "{}", "not a tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<gone>"}', "eos_token '<gone>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token must be a text"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "generation_config.json: end tokens must be whole"),
    ],
)
def test_a_file_that_is_wrong_is_named(name, content, words_, tmp_path):
    directory = words(tmp_path / "t", TOKENS)
    (directory / name).write_text(content)
    with pytest.raises(ConfigError, match=words_):
        HfTokenizer.from_dir(directory)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must hold a tokenizer\.json"):
        HfTokenizer.from_dir(tmp_path)


def test_settings_of_a_training_pipeline_do_not_cut_or_pad_prompts(tmp_path):
    def prepare(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)

    tokenizer = HfTokenizer.from_dir(words(tmp_path / "t", TOKENS, prepare=prepare))
    assert tokenizer.encode("hello world hello") == [3, 4, 3]


def test_a_caller_finds_its_own_tokenizer_unchanged(tmp_path):
    theirs = Tokenizer.from_file(str(words(tmp_path / "t") / "tokenizer.json"))
    theirs.enable_truncation(2)
    theirs.add_special_tokens([AddedToken("<stop>", special=True)])
    ours = HfTokenizer.wrap(theirs, eos_ids=theirs.token_to_id("<stop>"))
    assert ours.encode("hello world hello <stop>") == [3, 4, 3, 7] and ours.eos_ids == {7}
    assert theirs.truncation["max_length"] == 2


# What is imported

SCRIPT = """
import sys
from pathlib import Path
from maxtext_paged.tokenizer import HfTokenizer
tokenizer = HfTokenizer.from_dir(sys.argv[1])
ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
tokenizer.decode(ids), tokenizer.tokenizer.batch_decode([ids])
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "jetstream", "jax", "maxtext"}))
"""


def run(code: str, *arguments: Any, path: list[Path]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture
def torch_installed(tmp_path: Path) -> Path:
    """A directory in which torch can be found, and whose import ends the process."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    metadata = tmp_path / "site" / "torch-2.13.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    return tmp_path / "site"


def test_neither_torch_nor_transformers_is_loaded_even_where_torch_is_installed(tmp_path, torch_installed):
    template = {"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}
    directory = words(tmp_path / "t", TOKENS | template)
    assert run(SCRIPT, directory, path=[ROOT, torch_installed]) == "[]"


NATIVE_SCRIPT = """
import sys
from types import SimpleNamespace
from maxtext_paged.tokenizer import load_tokenizer
config = SimpleNamespace(tokenizer_type=sys.argv[1], tokenizer_path=sys.argv[2], add_bos=True)
print(load_tokenizer(config).encode("hello") and sorted({"torch", "jetstream"} & set(sys.modules)))
"""


@pytest.mark.maxtext
@pytest.mark.parametrize(
    ("kind", "file"), [("sentencepiece", "tokenizer.llama2"), ("tiktoken", "tokenizer_llama3.tiktoken")]
)
def test_maxtexts_own_tokenizers_load_without_torch(kind, file, torch_installed):
    package = Path(importlib.util.find_spec("maxtext").origin).parent
    assert run(NATIVE_SCRIPT, kind, package / "assets/tokenizers" / file, path=[ROOT, torch_installed]) == "[]"
