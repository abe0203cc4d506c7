#!/bin/bash
# Checks and measures realrl on a GPU, in stages with time limits. It installs nothing and needs no network. From the
# root of a checkout:
#
#   bash tools/gpu/run.sh [facts] [parity] [functional] [bench] [profile] [ppo]     # without names: all but ppo
#
# Each result is written as it is found; docs/gpu.md describes the stages. Settings from the environment:
#   PYTHON          interpreter with torch (python3)
#   DEVICE          cuda, or cpu for a dry run with tiny sizes
#   OUT             folder for results (runs/gpu)
#   TOTAL_SECONDS   limit for all stages together (540)
#   WORKERS         processes for the tests (6)
set -u
tools=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$tools/../.." && pwd)
cd "$root" || exit 2
python=${PYTHON:-python3}
slower=1
[ "${DEVICE:-cuda}" = cpu ] && slower=4 # limits of a dry run are four times as long
total=${TOTAL_SECONDS:-$((540 * slower))}
export OUT=${OUT:-runs/gpu} DEVICE=${DEVICE:-cuda} WORKERS=${WORKERS:-6}
export tools python
mkdir -p "$OUT"
log=$OUT/all.log
begun=$SECONDS
failed=()
say() { echo "=== $(printf %3d $((SECONDS - begun))) s: $*" | tee -a "$log"; }

# Unpack the wheels that prepare.sh downloaded. They come first on the path, before older versions on the machine.
site=$root/.gpu/site
if compgen -G ".gpu/wheels/*.whl" >/dev/null && [ ! -e "$site/.complete" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site" .gpu/wheels/*.whl || exit 2
    touch "$site/.complete"
fi
export PYTHONPATH="$tools:$site:$root/src:$root:$root/bench/gpu:$root/bench:$root/bench/peer"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# Compile kernels on idle cores while the first stages run, because Triton takes seconds to launch a new kernel.
warm_up() {
    local capability models
    local groups=(
        qwen2.5-0.5b,odd qwen2.5-1.5b,qwen2.5-7b qwen3-8b,llama-2-7b gemma-2-9b heads-of-80,one-kv-head,sinks
    )
    capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || return
    for models in "${groups[@]}"; do
        OMP_NUM_THREADS=1 timeout 200 nice -n 5 "$python" "$tools/compile_kernels.py" --capabilities "$capability" \
            --models "$models" --cache "$TRITON_CACHE_DIR" >>"$OUT/compile.log" 2>&1 &
    done
    wait
}
if [ "$DEVICE" = cuda ]; then
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$root/.gpu/triton}
    [ "$(nproc)" -ge 8 ] && [ ! -d "$TRITON_CACHE_DIR" ] && warm_up &
fi

# stage NAME SECONDS COMMAND...: runs a command for at most SECONDS, or for the time that is left of the total.
stage() {
    local name=$1 limit=$(($2 * slower)) left=$((total - (SECONDS - begun))) status
    shift 2
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 10 ]; then
        say "$name: no time left"
        failed+=("$name (no time left)")
        return
    fi
    say "$name, at most $limit s"
    # A script starts nothing new in its last 8 seconds, so that it can end by itself.
    STAGE_SECONDS=$((limit - 8)) timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$log"
    status=${PIPESTATUS[0]}
    say "$name ended with status $status"
    [ "$status" -ne 0 ] && failed+=("$name (status $status)")
}

# Run tests and small training runs at the same time. Neither is timed, and both mostly import and launch.
functional() {
    local tests runs
    timeout -k 5 "$STAGE_SECONDS" "$python" "$tools/small_runs.py" >"$OUT/small_runs.log" 2>&1 &
    local others=$!
    # The Makefile has the list of paths; the machine may lack make.
    # shellcheck disable=SC2046
    timeout -k 5 "$STAGE_SECONDS" "$python" -m pytest -q -p no:cacheprovider -m gpu -n "$WORKERS" --dist load \
        --maxfail=12 --timeout=120 --durations=8 --junitxml="$OUT/junit.xml" \
        $(sed -n '/^GPU_TESTS :=/,/[^\\]$/p' Makefile | tr -d '\\' | sed 's/^GPU_TESTS :=//')
    tests=$?
    wait "$others"
    runs=$?
    cat "$OUT/small_runs.log"
    echo "tests: status $tests, training runs: status $runs"
    return $((tests != 0 || runs != 0))
}
export -f functional

[ $# -eq 0 ] && set -- facts parity functional bench profile
for name in "$@"; do
    case $name in
        facts) stage facts 45 "$python" "$tools/facts.py" ;;
        parity) stage parity 110 "$python" "$tools/parity.py" ;;
        functional) stage functional 175 bash -c functional ;;
        bench) stage bench 190 "$python" "$tools/speed.py" ;;
        profile) stage profile 50 "$python" "$tools/kernel_times.py" ;;
        ppo) stage ppo 150 "$python" bench/gpu/run.py --only ppo --device "$DEVICE" --out "$OUT/ppo.md" ;;
        *)
            echo "there is no stage '$name'; stages are facts, parity, functional, bench, profile and ppo" >&2
            exit 2
            ;;
    esac
done
"$python" "$tools/summary.py" "$OUT" | tee "$OUT/summary.md"
say "stages that failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
