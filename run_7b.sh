#!/usr/bin/env bash
# run_7b.sh: the paper's experiment: Qwen2.5-Math-7B on DAPO-Math-17k, one node of 8 GPUs with 80 GB each.
#
#   bash run_7b.sh                           # all of RLEP: baseline, its experience pool, RLEP from the base model, evaluation
#   ARM=baseline bash run_7b.sh              # GRPO without replay, mini-batch 64 (DAPO-nodyn-bs64 in the paper)
#   ARM=dapo     bash run_7b.sh              # DAPO: dynamic sampling, mini-batch 32
#   ARM=bs32     bash run_7b.sh              # GRPO, mini-batch 32 (DAPO-nodyn-bs32)
#   PHASES="collect" bash run_7b.sh          # one phase alone: baseline, collect, rlep (or the arm's name), eval, curves
#   SMOKE=1 bash run_7b.sh                   # the same command lines with a tiny model on two CPU ranks, minutes
#   bash run_7b.sh --replay=4 --seed=1       # options of rlep.py go to every phase that knows them
#
# Hardware: 8 x 80 GB; host memory for the base model's file once (15 GB) and, at a save, its weights in float32 (30 GB).
# Disk: 92 GB a checkpoint (weights 30, optimizer 61); --keep=2 newest and the best of two arms: 550 GB.
# Time and memory are planned, none of it measured yet: at the paper's 160 s a step 18 h for the baseline, 14 h for RLEP, and
# collection (1.1 million answers) about 8 h; `rlep.py plan` guesses 470 s a step, with 43 GiB of a GPU while sampling and 39
# in the update. `python rlep.py plan --model=...` tells both for other machines.
# Stopped at any moment, the same command continues; finished phases are skipped.
#
# From folders instead of the hub: MODEL=/models/qwen DATA=dapo.parquet EVAL=aime24.jsonl,aime25.jsonl,amc23.jsonl
# Several nodes, on each of them:  NODES="--nnodes=2 --node_rank=0 --master_addr=HOST --master_port=29500"  (OUT on a shared disk)
set -euo pipefail
cd "$(dirname "$0")"
source setup.sh
make_env "${VENV:-$repo/.venv}" "$requirements"

ARM=${ARM:-rlep}
OUT=${OUT:-runs/7b}
GPUS=${GPUS:-8}
MODEL=${MODEL:-Qwen/Qwen2.5-Math-7B}
DATA=${DATA:-BytedTsinghua-SIA/DAPO-Math-17k@train} # each question is there about 100 times: 17,398 are left
EVAL=${EVAL:-math-ai/aime24@test,math-ai/aime25@test,math-ai/amc23@test}
POOL=${POOL:-$OUT/pool.jsonl}

model=(--prompt_limit=1024 --response_limit=3072)
train=(
    --questions=512 --rollouts=16                # prompts per step, fresh rollouts of each
    --temperature=1.0 --top_p=1.0                # sampling in training and validation
    --mini_batch=64                              # prompts: 8 updates a step, one pass over the rollouts
    --clip_low=0.2 --clip_high=0.28 --dual_clip=10
    --kl_coef=0                                  # no KL term, no entropy bonus
    --lr=1e-6 --warmup=10 --weight_decay=0.1 --grad_clip=1.0
    --overlong_buffer=512 --overlong_factor=1.0  # soft penalty over the last 512 tokens of the limit
    --is_correction=none                         # as in the paper; auto corrects for vLLM's rounding
    --eval_every=5 --save_every=20
    --activation_checkpointing --micro_tokens=32768 --gpu_memory_fraction=0.4 --sampler_rows=512 --phase_minutes=120
)
collect=(--samples=64 --temperature=0.7 --top_p=0.95 --min_correct=2) # K; questions with at least 2 right answers
evaluation=(--samples=32 --temperature=1.0 --top_p=1.0)               # avg@32, maj@32, beside the paper's
steps_baseline=400 steps_rlep=320                                     # where the paper reports them

case $ARM in
    rlep) phases="baseline collect rlep eval curves" arms="baseline rlep" ;;
    baseline) phases="baseline eval curves" arms=baseline ;;
    dapo) phases="dapo eval curves" arms=dapo ;;
    bs32) phases="bs32 eval curves" arms=bs32 ;;
    *) echo "error: ARM=$ARM: must be rlep, baseline, dapo or bs32" >&2; exit 2 ;;
esac
PHASES=${PHASES:-$phases}
for p in $PHASES; do
    [[ " $phases " == *" $p "* ]] || { echo "error: PHASES: $p is none of: $phases" >&2; exit 2; }
done
wanted() { [[ " $PHASES " == *" $1 "* ]] && echo && echo "=== $1"; }

smoke=()
if [ "${SMOKE:-0}" = 1 ]; then # later options win over earlier ones: the command lines below are the same
    GPUS=2 MODEL=$OUT/tiny/base DATA=$OUT/tiny/train.jsonl EVAL=$OUT/tiny/test.jsonl
    export OMP_NUM_THREADS=1
    [ -e "$OUT/tiny" ] || python tiny.py --out="$OUT/tiny" --train=16 --test=6 --arithmetic_steps=400 --strategy_steps=5
    smoke=(--device=cpu --response_limit=24 --questions=8 --rollouts=4 --mini_batch=4 --overlong_buffer=4 --lr=3e-4 --samples=8
           --min_correct=1 --eval_samples=2 --eval_every=1 --save_every=1 --steps=2 --verify_workers=1 --micro_tokens=512)
fi
read -ra nodes <<<"${NODES:---standalone}"
ranks() { torchrun "${nodes[@]}" --nproc_per_node="$GPUS" rlep.py "$@"; }
user=("$@")
arm() { # NAME STEPS REPLAY OPTIONS: one training run from the base model
    ranks train --model="$MODEL" --data="$DATA" --eval_data="$EVAL" "${model[@]}" "${train[@]}" --steps="$2" "${@:4}" "${smoke[@]}" "${user[@]}" $3 --out="$OUT/$1"
}

if wanted baseline; then arm baseline $steps_baseline --replay=0; fi
if wanted dapo; then arm dapo $steps_baseline --replay=0 --mini_batch=32 --dynamic_sampling; fi
if wanted bs32; then arm bs32 $steps_baseline --replay=0 --mini_batch=32; fi
if wanted collect; then
    ranks collect --model="$OUT/baseline" --data="$DATA" "${model[@]}" "${collect[@]}" "${smoke[@]}" "${user[@]}" --pool="$POOL"
fi
if wanted rlep; then arm rlep $steps_rlep "" --replay=2 --pool="$POOL"; fi  # M = 2; nothing else differs from the baseline
if wanted eval; then
    for name in $arms; do
        ranks eval --model="$OUT/$name" --data="$EVAL" "${model[@]}" "${evaluation[@]}" "${smoke[@]}" "${user[@]}" --out="$OUT/eval-$name"
    done
fi
if wanted curves; then
    runs=(); for name in $arms; do runs+=("$OUT/$name"); done
    python plot.py "${runs[@]}" --out="$OUT/curves.png"
fi
