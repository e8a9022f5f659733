#!/usr/bin/env bash
# All tests: bash tests/run.sh [pytest options]. With vllm as the first word: those against the real vLLM engine, in an
# environment of its own (.venv-vllm). No network and no GPU are needed once the environment is made.
set -euo pipefail
cd "$(dirname "$0")/.."
source setup.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1  # one thread: sums in one order, so bit-equal runs
if [ "${1:-}" = vllm ]; then
    # vLLM's CPU build brings builds of these that do not fit a CPU torch; text models need none of them
    make_env "${VENV_VLLM:-$repo/.venv-vllm}" "$repo/tests/requirements-vllm.txt" torchvision torchaudio torchcodec
    exec python -m pytest -q tests/test_vllm.py "${@:2}"
fi
make_env "${VENV:-$repo/.venv}" "$requirements"
exec python -m pytest -q -n 2 --dist loadfile tests "$@"  # two processes, a file of tests at a time (-n 0 for one)
