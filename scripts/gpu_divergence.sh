#!/usr/bin/env bash
# Rank divergence on N GPUs of this node: one divergent rank, the planted faults, a sample of healthy programs, steady state.
#
#     scripts/gpu_divergence.sh N OUT_DIR
#
# Takes about ten minutes on 4 GPUs. Every step has a hard time limit, a failed step does not stop the rest; OUT_DIR gets
# divergence.json, faults.json, clean.json, bench_sentinel.json and the logs. Exit 0 when all of them are as they should be.
set -uo pipefail
cd "$(dirname "$0")/.."
num_gpus=${1:?number of GPUs}
out=${2:?output directory}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=0

# step NAME LIMIT_S COMMAND...
step() {
  timeout -s KILL "$2" "${@:3}" >"$out/$1.log" 2>&1
  local status=$?
  [ $status -eq 0 ] && echo "ok  $1" || { echo "BAD $1: exit $status, see $out/$1.log"; failed=1; }
}

step bench_sentinel 120 python3 -m torch.distributed.run --standalone --nproc-per-node 2 \
  scripts/bench_sentinel.py --rounds 20 --out "$out/bench_sentinel.json"
step divergence 240 python3 scripts/bench_divergence.py --nproc "$num_gpus" --preset wan14b_8 --json "$out/divergence.json"
step faults 900 python3 scripts/faults.py run --jobs $((num_gpus * 2)) --json "$out/faults.json"

# Nine parts beside each other: most of a run is start and compile, on one core per rank.
mkdir -p "$out/parts"
for part in 1 2 3 4 5 6 7 8 9; do
  step "parts/$part" 550 python3 scripts/clean_runs.py --what sentinel --device cuda --runs 7 --part $part/9 \
    --timeout-s 150 --json "$out/parts/$part.json" &
done
wait
step clean 60 python3 scripts/clean_runs.py --merge "$out"/parts/{1..9}.json --json "$out/clean.json"
exit $failed
