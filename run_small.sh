#!/usr/bin/env bash
# run_small.sh: all of RLEP on one machine: base model, GRPO baseline, experience pool, RLEP, evaluation, curves.
#
#   bash run_small.sh                       # without a GPU: the embedded tiny default, 2 cores, minutes, under 3 GB
#   SEEDS=3 bash run_small.sh               # three seeds per arm: curves with bands, table with standard errors
#   bash run_small.sh --replay=4            # any option of rlep.py: handed to every phase that knows it
#   TINY="--train=128" bash run_small.sh    # options of tiny.py
#   MODEL=Qwen/Qwen2.5-Math-1.5B DATA=train.jsonl EVAL=test.jsonl bash run_small.sh
#
# With an NVIDIA GPU: Qwen2.5-Math-1.5B with LoRA on GSM8K (24 GB of memory and about a day are planned, not yet measured).
# Every phase that is finished is skipped when the script is run again, and one that was stopped continues.
set -euo pipefail
cd "$(dirname "$0")"
source setup.sh
make_env "${VENV:-$repo/.venv}" "$requirements"

SEEDS=${SEEDS:-1}
OUT=${OUT:-runs/small}
if has_gpu || [ -n "${MODEL:-}" ]; then
    MODEL=${MODEL:-Qwen/Qwen2.5-Math-1.5B}
    DATA=${DATA:-openai/gsm8k/main@train}
    EVAL=${EVAL:-openai/gsm8k/main@test}
    common=(--response_limit=1024)
    train=(--lora_rank=32 --lr=2e-5 --questions=64 --rollouts=16 --mini_batch=16 --steps=100 --overlong_buffer=256 --eval_every=20
           --eval_samples=1 --activation_checkpointing)
    collect=(--samples=32)
    evaluation=(--samples=4)
else
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # a model this small gains nothing from a second thread
    common=(--response_limit=32)
    train=(--questions=32 --rollouts=8 --mini_batch=8 --steps=60 --lr=2e-4 --warmup=5 --weight_decay=0 --overlong_buffer=0
           --eval_every=5 --save_every=20)
    collect=(--samples=32 --temperature=1 --top_p=1)
    evaluation=(--samples=16)
fi
[[ $SEEDS =~ ^[1-9][0-9]*$ ]] || { echo "error: SEEDS=$SEEDS: must be a whole number from 1 on" >&2; exit 2; }

phase() { echo; echo "=== $*"; }
for ((seed = 0; seed < SEEDS; seed++)); do
    run=$OUT/seed$seed
    model=${MODEL:-$run/tiny/base} data=${DATA:-$run/tiny/train.jsonl} held_out=${EVAL:-$run/tiny/test.jsonl}
    if [ -z "${MODEL:-}" ]; then
        phase "seed $seed: the embedded base model"
        python tiny.py --out="$run/tiny" --seed="$seed" ${TINY:-}
    fi
    phase "seed $seed: GRPO baseline"
    python rlep.py train --model="$model" --data="$data" --eval_data="$held_out" "${common[@]}" "${train[@]}" --seed="$seed" "$@" --replay=0 --out="$OUT/baseline-s$seed"
    phase "seed $seed: experience pool from the baseline"
    python rlep.py collect --model="$OUT/baseline-s$seed" --data="$data" "${common[@]}" "${collect[@]}" --seed="$seed" "$@" --pool="$run/pool.jsonl"
    phase "seed $seed: RLEP from the base model"
    python rlep.py train --model="$model" --data="$data" --eval_data="$held_out" "${common[@]}" "${train[@]}" --seed="$seed" --replay=2 "$@" --pool="$run/pool.jsonl" --out="$OUT/rlep-s$seed"
    phase "seed $seed: evaluation"
    for arm in baseline rlep; do
        python rlep.py eval --model="$OUT/$arm-s$seed" --data="$held_out" "${common[@]}" "${evaluation[@]}" --seed="$seed" "$@" --out="$run/eval-$arm"
    done
done

phase "all seeds"
python plot.py "$OUT"/baseline-s* "$OUT"/rlep-s* --out="$OUT/curves.png"
