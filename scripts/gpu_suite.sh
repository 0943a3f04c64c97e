#!/usr/bin/env bash
# Gate and benchmarks on N GPUs of this node; everything that matters ends in one JSON file.
#
#     scripts/gpu_suite.sh N OUT_DIR [quick|full|maths]
#
# quick and full run the gate and its benchmarks; maths the wrappers, the correctness matrix and the block's options.
# One GPU: quick or full, without what needs two ranks.
# Each step has a hard time limit, a failed step does not stop the rest, a step that no longer fits into
# SUITE_LIMIT_S (default 3600) is left out and named, and the table is printed last.
set -uo pipefail
cd "$(dirname "$0")/.."
num_gpus=${1:?number of GPUs}
out=${2:?output directory}
size=${3:-full}
work=$(mktemp -d)
mkdir -p "$out"
log="$out/suite.log"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

deadline=$(($(date +%s) + ${SUITE_LIMIT_S:-3600}))
# fits LIMIT_S NAME: is there time for a step that may take that long?
fits() {
  [ $(($(date +%s) + $1)) -le "$deadline" ] && return
  echo "left out, no time: $2" | tee -a "$log"
  return 1
}
torchrun() { timeout -s KILL "$1" python3 -m torch.distributed.run --standalone --nproc-per-node "$2" "${@:3}" >>"$log" 2>&1; }

# gate NAME RANKS LIMIT_S EXPECTED_EXIT ARGS...: one run of the gate; its verdict must carry the expected exit code.
gate() {
  local name=$1 ranks=$2 limit=$3 expected=$4 start
  fits "$limit" "gate $name" || return 0
  start=$(date +%s.%N)
  echo "=== gate $name: ${*:5}" >>"$log"
  torchrun "$limit" "$ranks" repro/tp_compile_repro.py --device cuda --run-dir "$work/gate-$name" "${@:5}"
  python3 - "$work/gate-$name" "$expected" "$ranks" "$start" "${@:5}" >"$work/gate-$name.json" <<'PY'
import json, pathlib, sys, time
run, expected, ranks, start, *arguments = sys.argv[1:]
path = pathlib.Path(run, "verdict.json")
verdict = json.loads(path.read_text()) if path.exists() else None
print(json.dumps({
    "command": f"torchrun --standalone --nproc-per-node {ranks} repro/tp_compile_repro.py " + " ".join(arguments),
    "wall_s": round(time.time() - float(start), 1),
    "expected_exit": int(expected),
    "as_expected": verdict is not None and verdict["exit_code"] == int(expected),
    "verdict": verdict,
}))
PY
}

# bench NAME LIMIT_S ARGS...: interleaved timings of eager, A, B and C.
bench() {
  fits "$2" "bench $1" || return 0
  echo "=== bench $1: ${*:3}" >>"$log"
  timeout -s KILL "$2" python3 -m tpcompile bench --nproc "$num_gpus" --device cuda --rounds 12 --logs "$work/logs-$1" \
    --program eager --program A --program B --program C --json "$work/bench-$1.json" "${@:3}" >>"$log" 2>&1
}

# program NAME RANKS LIMIT_S ARGS...: a script that prints or writes one JSON object, exit status 0 when all is right.
program() {
  local name=$1 ranks=$2 limit=$3 status
  fits "$limit" "$name" || return 0
  echo "=== $name: ${*:4}" >>"$log"
  torchrun "$limit" "$ranks" "${@:4}"
  status=$?
  [ -s "$work/program-$name.json" ] || echo null >"$work/program-$name.json"
  echo "$status" >"$work/program-$name.exit"
}

options_on="--set block.cross_attention=true --set block.modulation=true --set block.norm=layer --set block.norm_affine=false
  --set block.masked=true --set block.causal=true --set block.sequence_parallel=true --set block.dropout=0.1
  --set block.uneven=pad --set block.num_heads=14 --set block.num_kv_heads=14 --set block.head_size=8 --set block.ffn_dim=122"

if [ "$size" = maths ]; then
  program collectives "$num_gpus" 150 scripts/gpu_collectives.py --out "$work/program-collectives.json"
  program matrix "$num_gpus" 330 scripts/correctness_matrix.py --size gpu --limit-s 240 --json "$work/program-matrix.json"
  gate wan21-14b-train "$num_gpus" 120 0 --preset wan21_14b --train
  gate wan21-14b-sequence-parallel "$num_gpus" 120 0 --preset wan21_14b --train --set block.sequence_parallel=true
  gate llama8b-replicated-kv "$num_gpus" 90 0 --preset llama8b --train --set block.num_kv_heads=$((num_gpus / 2))
  # shellcheck disable=SC2086
  gate every-option "$num_gpus" 90 0 --preset cpu_smoke --train $options_on
else
  gate wan14b-train "$num_gpus" 180 0 --preset wan14b --mode all --train
  gate wan14b-8 "$num_gpus" 120 0 --preset wan14b_8 --mode all
  bench wan14b 100 --preset wan14b
  bench wan14b-8 100 --preset wan14b_8
fi
if [ "$size" = full ]; then
  bench wan14b-train 120 --preset wan14b --train
  gate wan14b-8-train "$num_gpus" 120 0 --preset wan14b_8 --mode all --train
  gate llama8b-train "$num_gpus" 120 0 --preset llama8b --mode C --train
  bench wan14b-256 100 --preset wan14b_256
fi
if [ "$size" != maths ] && [ "$num_gpus" -gt 1 ]; then # one rank has no other to differ from
  gate fault-rank-constant "$num_gpus" 60 1 --preset cpu_smoke --mode C --fault rank_constant
  gate fault-killed "$num_gpus" 60 1 --preset cpu_smoke --mode C --fault killed
  gate fault-reduce-op "$num_gpus" 60 1 --preset cpu_smoke --mode C --fault other_reduce_op
fi
if [ "$size" = full ]; then
  gate wan14b-256-train "$num_gpus" 100 0 --preset wan14b_256 --mode C --train
  if [ "$num_gpus" -gt 1 ]; then gate two-ranks 2 80 0 --preset wan14b_8 --mode C; fi
  gate one-rank 1 80 0 --preset wan14b_8 --mode C
fi

python3 - "$work" "$out/results.json" "$num_gpus" "$size" <<'PY'
import json, pathlib, statistics, sys
import torch
work, result, num_gpus = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
read = lambda pattern: {p.stem.partition("-")[2]: json.loads(p.read_text() or "null") for p in sorted(work.glob(pattern))}
gates, benches, programs = read("gate-*.json"), read("bench-*.json"), read("program-*.json")
exits = {p.stem.partition("-")[2]: int(p.read_text()) for p in sorted(work.glob("program-*.exit"))}
text = json.dumps({
    "command": f"scripts/gpu_suite.sh {num_gpus} OUT {sys.argv[4]}",
    "num_gpus": num_gpus,
    "gpu": torch.cuda.get_device_name(0),
    "torch": torch.__version__,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    "gates": gates,
    "benchmarks": benches,
    "programs": programs,
}, indent=1)
result.write_text(text.replace(f"{pathlib.Path.cwd()}/", "") + "\n")  # paths of this machine say nothing elsewhere
for name, gate in gates.items():
    verdict = gate["verdict"] or {}
    mark = "ok " if gate["as_expected"] else "BAD"
    print(f"{mark} {name:22} {gate['wall_s']:6.1f} s  exit {verdict.get('exit_code')}  {verdict.get('summary', 'no verdict')[:150]}")
    for check in verdict.get("checks", []):
        if check["status"] == "fail" and not gate["as_expected"]:
            print("      ", check["name"], "|", check["observed"][:200], "|", check["details"][:3])
for name, bench in benches.items():
    for row in (row for measured in (bench or {}).get("measured", ()) for row in measured["rows"]):
        ms = statistics.median(row["rounds_ms"]) if row["rounds_ms"] else row["why_not"]
        print(f"    {name:22} {row['name']:6} ms {ms}")
for name, status in exits.items():
    print(f"{'BAD' if status else 'ok '} {name:22} exit {status}")
sys.exit(0 if gates and all(g["as_expected"] for g in gates.values()) and not any(exits.values()) else 1)
PY
status=$?
rm -rf "$work"
exit $status
