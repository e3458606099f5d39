"""A converted directory is the model in the file: same logits, complete, usable as it stands."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.utils.model_creation_utils import from_pretrained, verify_and_sync_scan_layers

import maxtext_paged.convert as convert_module
from maxtext_paged.convert import CONVERTER_VERSION, convert_gguf, converted_smollm2
from maxtext_paged.convert.llama import unpermute_rope
from maxtext_paged.tokenizer import HfTokenizer
from tests.converted_dense import ConvertedDense, error_of
from tests.llama_numpy import LlamaNumpy
from tests.tiny_gguf import EMB, HEADS, KV_HEADS, LAYERS, MLP, TEMPLATE, VOCAB, tensors, write_gguf

ROOT = Path(__file__).parents[2]
IDS = np.random.default_rng(3).integers(0, VOCAB, 80).tolist()

VARIATIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "a head of its own": {"weights": tensors(own_head=True)},
    "head size of its own": {
        "weights": tensors(head_dim=32),
        "header": {"llama.attention.key_length": 32, "llama.attention.value_length": 32},
    },
    "one KV head each": {
        "weights": tensors()
        | {
            f"blk.{layer}.attn_{part}.weight": np.random.default_rng(layer).standard_normal((EMB, EMB), np.float32) / 4
            for layer in range(LAYERS)
            for part in "kv"
        },
        "header": {"llama.attention.head_count_kv": HEADS},
    },
    "another RoPE base and epsilon": {
        "header": {"llama.rope.freq_base": 500_000.0, "llama.attention.layer_norm_rms_epsilon": 1e-2}
    },
    "quantised": {
        "quantise": {
            "blk.0.attn_q.weight": gguf.GGMLQuantizationType.Q8_0,
            "blk.1.ffn_gate.weight": gguf.GGMLQuantizationType.Q4_1,
            "blk.1.ffn_down.weight": gguf.GGMLQuantizationType.F16,
            "token_embd.weight": gguf.GGMLQuantizationType.BF16,
        }
    },
}
IN_LONG_RUNS = ("head size of its own", "one KV head each")


@pytest.mark.slow
@pytest.mark.maxtext
@pytest.mark.parametrize(
    "variation",
    [pytest.param(name, marks=[pytest.mark.long] if name in IN_LONG_RUNS else []) for name in VARIATIONS],
    ids=lambda name: name.replace(" ", "-"),
)
def test_logits_of_the_converted_model_equal_an_independent_forward(variation, tmp_path):
    source = write_gguf(tmp_path / "model.gguf", **VARIATIONS[variation])
    dense = ConvertedDense(convert_gguf(source, tmp_path / "out"))
    assert error_of(dense.logits([IDS])[0], LlamaNumpy(source).forward(IDS)) < 2e-5


@pytest.mark.slow
@pytest.mark.maxtext
def test_only_a_tied_head_is_rounded_to_bfloat16(tmp_path):
    """Why the head is written out: MaxText rounds a tied table. Its logits keep their scale all the same."""
    source = write_gguf(tmp_path / "model.gguf")
    expected = LlamaNumpy(source).forward(IDS)
    tied = ConvertedDense(convert_gguf(source, tmp_path / "tied", tie_head=True))
    assert tied.config.logits_via_embedding and "decoder.logits_dense.kernel" not in tied.shapes()
    assert 1e-4 < error_of(tied.logits([IDS])[0], expected) < 1e-2
    untied = ConvertedDense(convert_gguf(source, tmp_path / "untied"))
    assert error_of(untied.logits([IDS])[0], expected) < 2e-5


@pytest.mark.maxtext
def test_the_checkpoint_holds_exactly_the_parameters_of_maxtexts_model(tmp_path):
    dense = ConvertedDense(convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "out"))
    head_dim = EMB // HEADS
    layer = {
        "pre_self_attention_layer_norm.scale": (EMB,),
        "post_self_attention_layer_norm.scale": (EMB,),
        "self_attention.query.kernel": (EMB, HEADS, head_dim),
        "self_attention.key.kernel": (EMB, KV_HEADS, head_dim),
        "self_attention.value.kernel": (EMB, KV_HEADS, head_dim),
        "self_attention.out.kernel": (HEADS, head_dim, EMB),
        "mlp.wi_0.kernel": (EMB, MLP),
        "mlp.wi_1.kernel": (EMB, MLP),
        "mlp.wo.kernel": (MLP, EMB),
    }
    expected = {f"decoder.layers_{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    expected |= {
        "token_embedder.embedding": (VOCAB, EMB),
        "decoder.decoder_norm.scale": (EMB,),
        "decoder.logits_dense.kernel": (EMB, VOCAB),
    }
    assert dense.shapes() == expected


@pytest.mark.slow
@pytest.mark.maxtext
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MaxText's own calls of jax and flax
def test_maxtexts_from_pretrained_restores_it(tmp_path):
    """The loader MaxText's own scripts use; ``ConvertedDense`` goes through the engine's."""
    source = write_gguf(tmp_path / "model.gguf")
    out = convert_gguf(source, tmp_path / "out")
    config = convert_config(out, "attention=dot_product")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
    ids = jnp.asarray([IDS])
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        model = from_pretrained(config, mesh=mesh)
        logits = model(ids, jnp.arange(len(IDS))[None], decoder_segment_ids=jnp.ones_like(ids), enable_dropout=False)
    assert error_of(np.asarray(logits)[0], LlamaNumpy(source).forward(IDS)) < 2e-5


@pytest.mark.maxtext
def test_a_scanned_run_is_told_that_the_checkpoint_is_not(tmp_path):
    out = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    config = convert_config(out, "scan_layers=true")
    with pytest.raises(ValueError, match="scan_layers=False"):
        verify_and_sync_scan_layers(config)


def convert_config(directory: Path, *overrides: str) -> Any:
    argv = ["test", str(directory / "config.yml"), "base_output_directory=unused", "log_config=false", *overrides]
    return pyconfig.initialize(argv)


def test_rows_come_back_in_the_order_they_had_before_llama_cpp_permuted_them():
    def permute(w: np.ndarray, heads: int) -> np.ndarray:
        """As in llama.cpp's convert_hf_to_gguf.py."""
        return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

    rows = np.arange(3 * 8 * 5, dtype=np.float32).reshape(3 * 8, 5)
    np.testing.assert_array_equal(unpermute_rope(permute(rows, 3), 3), rows)
    assert not np.array_equal(permute(rows, 3), rows)


def test_the_directory_is_complete_and_says_so(tmp_path):
    out = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "deep" / "out")
    assert {path.name for path in out.iterdir()} == {
        "checkpoint",
        "config.yml",
        "conversion.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o755
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"eos_token_id": 2, "bos_token_id": 1}
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE and config["eos_token"] == "<|im_end|>"


def test_every_end_token_the_file_names_is_kept(tmp_path):
    header = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    out = convert_gguf(write_gguf(tmp_path / "model.gguf", header=header), tmp_path / "out")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert HfTokenizer.from_dir(out).eos_ids == {0, 2}


@pytest.mark.parametrize(("add_bos", "expected"), [(False, []), (True, [1])])
def test_the_files_wish_for_a_begin_token_is_kept(add_bos, expected, tmp_path):
    header = {"tokenizer.ggml.add_bos_token": add_bos}
    out = convert_gguf(write_gguf(tmp_path / "model.gguf", header=header), tmp_path / "out")
    tokenizer = HfTokenizer.from_dir(out)
    assert tokenizer.encode("ab") == expected + HfTokenizer.from_dir(out, add_bos=False).encode("ab")
    assert yaml.safe_load((out / "config.yml").read_text())["add_bos"] is add_bos


def test_overwrite_replaces_an_earlier_conversion_whole(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    out = convert_gguf(source, tmp_path / "out", max_target_length=100)
    (out / "left-over.txt").write_text("from before")
    assert convert_gguf(source, out, overwrite=True, max_target_length=50) == out
    assert not (out / "left-over.txt").exists()
    assert yaml.safe_load((out / "config.yml").read_text())["max_target_length"] == 50
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "out"}


def test_an_empty_directory_is_as_good_as_none(tmp_path):
    (tmp_path / "out").mkdir()
    out = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    assert (out / "config.yml").is_file()


class Conversions:
    """Counts what ``converted_smollm2`` really converts, on a tiny file in the weights' place."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = write_gguf(tmp_path / "model.gguf")
        self.count = 0

        def counted(*args: Any, **kwargs: Any) -> Path:
            self.count += 1
            return convert_gguf(*args, **kwargs)

        monkeypatch.setattr(convert_module, "find_packaged_gguf", lambda: self.source)
        monkeypatch.setattr(convert_module, "convert_gguf", counted)


@pytest.fixture
def conversions(tmp_path, monkeypatch) -> Conversions:
    return Conversions(tmp_path, monkeypatch)


def test_a_complete_conversion_is_reused(conversions, tmp_path):
    first = converted_smollm2(tmp_path / "cache")
    assert converted_smollm2(tmp_path / "cache") == first == tmp_path / "cache" / "smollm2-135m"
    assert conversions.count == 1


def test_a_conversion_that_is_stale_moved_or_incomplete_is_made_again(conversions, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    out = converted_smollm2(cache)

    monkeypatch.setattr(convert_module, "CONVERTER_VERSION", CONVERTER_VERSION + 1)
    converted_smollm2(cache)
    assert conversions.count == 2, "an older converter's"

    moved = tmp_path / "elsewhere"
    moved.mkdir()
    out.rename(moved / out.name)
    assert converted_smollm2(moved) == moved / out.name
    assert conversions.count == 3, "its config names the old place"
    assert str(moved) in (moved / out.name / "config.yml").read_text()

    weights = tensors()
    weights["output.weight"] = weights["token_embd.weight"]
    write_gguf(conversions.source, weights=weights)
    converted_smollm2(moved)
    assert conversions.count == 4, "another source file"


def test_two_processes_that_want_the_model_at_once_convert_it_once(conversions, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: converted_smollm2(tmp_path / "cache"), range(4)))
    assert len(set(found)) == 1 and conversions.count == 1


IMPORTS_CODE = """
import sys
from maxtext_paged.convert import convert_gguf, find_packaged_gguf
assert "jax" not in sys.modules, "importing the converter is cheap"
convert_gguf(sys.argv[1], sys.argv[2])
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "transformers", "maxtext", "jetstream"}))
"""


@pytest.mark.slow
def test_converting_needs_neither_torch_nor_transformers_nor_maxtext(tmp_path):
    source = write_gguf(tmp_path / "model.gguf")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_CODE, str(source), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


CONFIG_CODE = """
import sys
from maxtext.configs import pyconfig
for path in sys.argv[1:]:
    config = pyconfig.initialize(["", path, "log_config=false", "base_output_directory=unused"])
    print(config.attention, config.decoder_block.value, config.emb_dim, config.scan_layers, config.vocab_size)
"""


@pytest.mark.slow
@pytest.mark.maxtext
def test_the_configs_are_accepted_outside_pytest_from_any_directory(tmp_path):
    """Outside pytest, MaxText ends the process with status 2 on a bad key and may wait for other hosts."""
    out = convert_gguf(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    paths = [out / "config.yml", ROOT / "configs/smollm2-135m.yml", ROOT / "configs/test/tiny.yml"]
    done = subprocess.run(
        [sys.executable, "-c", CONFIG_CODE, *map(str, paths)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("gpu_paged")]
    assert lines == [
        f"gpu_paged llama2 {EMB} False {VOCAB}",
        "gpu_paged llama2 576 False 49152",
        "gpu_paged llama2 64 False 256",
    ], done.stderr


def test_the_config_in_the_repository_describes_the_converted_model_and_no_place():
    ours = yaml.safe_load((ROOT / "configs/smollm2-135m.yml").read_text())
    assert not {"load_parameters_path", "tokenizer_path"} & set(ours)
    assert not [value for value in ours.values() if isinstance(value, str) and value.startswith(("/", "~"))]
