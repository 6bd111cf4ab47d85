#!/usr/bin/env bash
# Runs the programs that `cargo xtask gpu-bundle` has built, on a machine with a GPU and without Rust.
set -uo pipefail

folder="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
archive="$folder/programs.tar.xz"
# Where the programs are unpacked, once for each archive.
bundle="${TMPDIR:-/tmp}/warpforge-bundle-$(cksum <"$archive" | tr ' ' '-')"
unavailable=77 # exit status: this machine cannot do it, which says nothing about the programs

usage() {
    cat <<'TEXT'
Usage, from the root of the repository (the programs read its files):
  run test [ARGS]          every test; one that finds no GPU fails. ARGS go to the test programs (a filter, --nocapture)
  run sanitize [ARGS]      all GPU tests under compute-sanitizer, with few property cases, in several processes, each with some of the
                           tests; what is found, and a line for each tool. ARGS choose the tests (filters, --skip NAME)
  run bench OUTDIR [ARGS]  every benchmark and its peers in PyTorch, if there is one; ours.jsonl and peers.jsonl in OUTDIR are
                           what `cargo xtask bench-report OUTDIR` reads. ARGS go to the benchmarks (filters, which the
                           peers get too; --floor=sm_80, --energy=all)
  run choice [ARGS]        a sample of the sweeps' shapes, each by every kernel that can do it: fails where the chosen one is more than a
                           twentieth behind the best. ARGS go to the benchmark (filters, --device)
  run scaling OUTDIR       sums over 2, 4, 8 … cards beside NCCL and PyTorch, and whole models over 1, 2, 4, 8 …: sums.N.jsonl, peers.N.jsonl and
                           models.jsonl in OUTDIR. WARPFORGE_MODELS chooses the models
  run example NAME [ARGS]  one example
  run all OUTDIR           tests, sanitizer, benchmarks, demo: one log each in OUTDIR, then a table

Environment
  WARPFORGE_CASES           property cases per test (sanitize: 2 unless set)
  WARPFORGE_SANITIZERS      compute-sanitizer's tools (memcheck racecheck synccheck initcheck)
  WARPFORGE_PROCESSES       processes side by side of sanitize (as many as cores, 16 at most)
  WARPFORGE_SANITIZER_LOGS  where sanitize leaves a log for each tool and process (a temporary folder)
  WARPFORGE_PEERS_LIMIT     seconds after which no further peer is timed (240 unless set); 0: no peers
  WARPFORGE_STEP_LIMIT      longest time of a step of `all`, in seconds (0, none)
TEXT
}

fail() {
    echo "run: $*" >&2
    exit 2
}

# each KIND COMMAND...: runs COMMAND with each program of the kind as its last word; fails if one fails or none is there.
each() {
    local kind="$1" program status=0 count=0
    shift
    for program in "$bundle/$kind"/*; do
        [[ -f "$program" ]] || continue
        count=$((count + 1))
        echo "=== $kind/$(basename "$program")"
        "$@" "$program" || status=$?
    done
    ((count > 0)) || fail "there is no $kind in $bundle"
    return "$status"
}

find_sanitizer() {
    local place
    for place in "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer \
        /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
        if [[ -x "$place" ]]; then
            echo "$place"
            return
        fi
    done
    return 1
}

args=()
plain() { "$1" ${args[@]+"${args[@]}"}; }

# Programs whose tests run kernels. Those of the loader provoke driver errors, which the sanitizer would count.
sanitized=(ops models agreement group)

# tests_of PROGRAM TOOL: the names of the tests for a tool, one a line.
tests_of() {
    # The faults among the tests provoke driver errors too; what the simulator alone runs is none of the sanitizer's business; and where all
    # logits are equal, all of a histogram's atomics meet, which takes racecheck minutes.
    local skipped=(--skip faults:: --skip every_kernel_is_simulated)
    if [[ "$2" == racecheck ]]; then skipped+=(--skip sampling::ties); fi
    "$1" --list --format terse "${skipped[@]}" ${args[@]+"${args[@]}"} | sed -n 's/: test$//p'
}

# checked SANITIZER TOOL PROGRAM NAMES: the tests named in a file under one tool; the log is beside it. Prints what came of it where that is
# a finding or a failure, and is 0 if it is neither.
checked() {
    local names status=0 log="$4.log" passed verdict=""
    mapfile -t names <"$4"
    "$1" --tool "$2" --error-exitcode 86 "$3" --test-threads=1 --exact "${names[@]}" >"$log" 2>&1 || status=$?
    passed="$(sed -n 's/^test result: .* \([0-9][0-9]*\) passed;.*/\1/p' "$log" | tail -n 1)"
    if grep -qi 'device not supported' "$log"; then
        verdict="compute-sanitizer does not support this device or its virtual machine"
        status="$unavailable"
    elif ((status == 86)); then
        verdict="FINDINGS: $(sed -n 's/^=* *\(ERROR SUMMARY: .*\|RACECHECK SUMMARY: .*\)/\1/p' "$log" | tail -n 1)"
    elif [[ "$passed" == "${#names[@]}" ]] && grep -q 'terminated before first instrumented API call' "$log"; then
        # Tests of what needs no GPU: there was nothing to look at.
        status=0
    elif ((status != 0)); then
        verdict="FAILED with status $status"
    elif [[ "$passed" != "${#names[@]}" ]]; then
        verdict="FAILED: ${passed:-none} passed"
        status=1
    fi
    if [[ -n "$verdict" ]]; then
        printf '%-10s %-22s %s\n' "$2" "$(basename "$4")" "$verdict"
        # The tests, the first finding with its place, and the end.
        printf '    %s\n' "${names[@]}"
        grep -m 1 -A 12 '^========= \(Error\|Warning\|Invalid\|Barrier\|Warpgroup\|Uninitialized\|Race\)' "$log"
        grep -v 'falls back to' "$log" | tail -n 25
        echo "    whole log: $log"
    fi
    return "$status"
}

# totals LOGS TOOL: a line for a tool.
totals() {
    local passed=0 all=0 folder="$1/$2"
    [[ -d "$folder" ]] || return 0
    passed="$(cat "$folder"/*.log 2>/dev/null | sed -n 's/^test result: .* \([0-9][0-9]*\) passed;.*/\1/p' | awk '{ sum += $1 } END { print sum + 0 }')"
    all="$(find "$folder" -type f ! -name '*.log' -exec cat {} + | wc -l)"
    printf '%-10s %d of %d tests passed, findings in %d runs\n' "$2" "$passed" "$all" \
        "$(grep -lE 'SUMMARY: [1-9]' "$folder"/*.log 2>/dev/null | wc -l)"
}

sanitize() {
    local sanitizer logs processes program tool name part status=0 one running=0
    sanitizer="$(find_sanitizer)" || {
        echo "run: compute-sanitizer is not installed" >&2
        return "$unavailable"
    }
    export WARPFORGE_CASES="${WARPFORGE_CASES:-2}"
    processes="$(nproc)"
    processes="${WARPFORGE_PROCESSES:-$((processes < 16 ? processes : 16))}"
    logs="${WARPFORGE_SANITIZER_LOGS:-$(mktemp -d)}"
    mkdir -p "$logs" || fail "cannot make $logs"
    # The driver's own size holds not all kernels, and what it assembles for one tool serves the next.
    export CUDA_CACHE_MAXSIZE="${CUDA_CACHE_MAXSIZE:-4294967296}"
    local count=0 tools
    read -ra tools <<<"${WARPFORGE_SANITIZERS:-memcheck racecheck synccheck initcheck}"
    for tool in "${tools[@]}"; do
        rm -rf "${logs:?}/$tool"
        mkdir -p "$logs/$tool"
        for name in "${sanitized[@]}"; do
            program="$bundle/test/$name"
            [[ -f "$program" ]] || continue
            # In turns, so that the tests of an operator, which take alike, are in different processes; few in each, so that none is waited
            # for alone.
            tests_of "$program" "$tool" >"$logs/$tool.names"
            awk -v parts="$(($(wc -l <"$logs/$tool.names") / 4 + 1))" -v file="$logs/$tool/$name." \
                '{ print > (file (NR - 1) % parts + 1) }' "$logs/$tool.names"
            for part in "$logs/$tool/$name".*; do
                [[ -s "$part" && "$part" != *.log ]] || continue
                count=$((count + 1))
                if ((running >= processes)); then
                    one=0
                    wait -n || one=$?
                    running=$((running - 1))
                    # A finding outweighs a tool that is not supported.
                    if ((one != 0 && (status == 0 || status == unavailable))); then status="$one"; fi
                fi
                checked "$sanitizer" "$tool" "$program" "$part" &
                running=$((running + 1))
            done
        done
    done
    while ((running > 0)); do
        one=0
        wait -n || one=$?
        running=$((running - 1))
        if ((one != 0 && (status == 0 || status == unavailable))); then status="$one"; fi
    done
    if ((count == 0)); then
        echo "run: no test has such a name" >&2
        return 1
    fi
    for tool in "${tools[@]}"; do totals "$logs" "$tool"; done
    return "$status"
}

# bench OUTDIR ARGS...: the peaks that PyTorch reaches, our benchmarks, the peers; one process after the other.
bench() {
    local out="$1" program="$bundle/bench/ops" limit="${WARPFORGE_PEERS_LIMIT:-240}" status=0 scratch word start="$SECONDS"
    local filters=() peers_args=() peers=(python3 benches/peers/peers.py)
    shift
    mkdir -p "$out" || fail "cannot make $out"
    [[ -f "$program" ]] || fail "there is no bench in $bundle"
    for word; do
        case "$word" in
            --energy=*) peers_args+=("$word") ;;
            -*) ;;
            *) filters+=("$word") ;;
        esac
    done
    scratch="$(mktemp -d)"
    export PYTHONUNBUFFERED=1
    if ((limit > 0)) && ! command -v python3 >/dev/null; then
        echo "run: no peers: python3 is not installed" >&2
        limit=0
    fi
    "$program" --list ${filters[@]+"${filters[@]}"} >"$scratch/cases.jsonl" || fail "cannot list the cases"
    : >"$scratch/peaks.jsonl"
    if ((limit > 0)); then
        echo "=== peaks"
        "${peers[@]}" --peaks --json "$scratch/peaks.jsonl" || echo "run: the peaks ended with status $?" >&2
        echo "--- $((SECONDS - start)) s"
    fi
    echo "=== ours"
    "$program" --json "$out/ours.jsonl" --peaks "$scratch/peaks.jsonl" "$@" || status=$?
    echo "--- $((SECONDS - start)) s"
    rm -f "$out/peers.jsonl"
    if ((limit > 0)); then
        echo "=== peers"
        # What the peers lack is no failure of ours, but that they end with an error is one.
        "${peers[@]}" --cases "$scratch/cases.jsonl" --json "$out/peers.jsonl" --workers 12 --limit "$limit" \
            ${peers_args[@]+"${peers_args[@]}"} ${filters[@]+"${filters[@]}"} || status=$?
        echo "--- $((SECONDS - start)) s"
    fi
    rm -rf "$scratch"
    return "$status"
}

# scaling OUTDIR: what several cards make of sums and of models; none that fails keeps the others from running.
scaling() {
    local out="$1" cards count devices status=0 counts=(1)
    local models="${WARPFORGE_MODELS:-qwen3-4b-instruct-2507,qwen3-coder-30b-a3b-instruct,glm-4.7-flash,qwen3-coder-next,qwen3-coder-next:fp8}"
    mkdir -p "$out" || fail "cannot make $out"
    rm -f "$out"/{sums.*,peers.*,models}.jsonl
    cards="$(nvidia-smi --list-gpus | wc -l)"
    ((cards > 1)) || fail "there are $cards cards"
    if [[ -z "${WARPFORGE_NCCL:-}" ]] && command -v python3 >/dev/null; then
        # PyTorch's, if there is one.
        WARPFORGE_NCCL="$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null || true)"
        if [[ -n "$WARPFORGE_NCCL" ]]; then export WARPFORGE_NCCL; else unset WARPFORGE_NCCL; fi
    fi
    for ((count = 2; count <= cards; count *= 2)); do
        counts+=("$count")
        devices="$(seq --separator=, 0 $((count - 1)))"
        echo "=== sums of $count cards"
        "$bundle/bench/group" --devices "$devices" --json "$out/sums.$count.jsonl" || status=$?
        python3 benches/peers/all_reduce.py --ranks "$count" --json "$out/peers.$count.jsonl" || status=$?
    done
    echo "=== models"
    "$bundle/bench/ranks" --models "$models" --ranks "$(IFS=,; echo "${counts[*]}")" --experts tensor,expert --batches 1,8,32 --json "$out/models.jsonl" || status=$?
    return "$status"
}

all() {
    local out="$1" step log status verdict failed=0 start table="" words
    mkdir -p "$out" || fail "cannot make $out"
    for step in test sanitize bench demo; do
        log="$out/$step.log"
        case "$step" in
            bench) words=(bench "$out") ;;
            demo) words=(example generate) ;;
            *) words=("$step") ;;
        esac
        start="$SECONDS"
        echo "=== $step: $log"
        status=0
        timeout --kill-after=10 "${WARPFORGE_STEP_LIMIT:-0}" bash "$folder/run" "${words[@]}" >"$log" 2>&1 || status=$?
        case "$status" in
            0) verdict=passed ;;
            "$unavailable") verdict=unavailable ;;
            124 | 137) verdict="TIMED OUT" ;;
            *) verdict=FAILED ;;
        esac
        if [[ "$verdict" != passed && "$verdict" != unavailable ]]; then
            failed=1
            tail -n 25 "$log"
        fi
        table+="$(printf '%-18s %-12s status %-4s %5d s' "$step" "$verdict" "$status" $((SECONDS - start)))"$'\n'
    done
    printf '=== summary\n%s' "$table" | tee "$out/summary.txt"
    return "$failed"
}

mode="${1:-help}"
shift || true
case "$mode" in
    help | --help | -h)
        usage
        exit 0
        ;;
    test | sanitize | bench | scaling | example | all) ;;
    *)
        usage >&2
        exit 2
        ;;
esac
if [[ ! -d "$bundle" ]]; then
    rm -rf "$bundle.part" && mkdir -p "$bundle.part"
    tar --extract --xz --file "$archive" --directory "$bundle.part" 2>/dev/null ||
        python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$archive" "$bundle.part" ||
        fail "cannot unpack $archive: neither tar with xz nor python3 could"
    mv "$bundle.part" "$bundle"
fi
[[ -f Cargo.toml && -d tests ]] || fail "start this from the root of the repository"
export CARGO_MANIFEST_DIR="$PWD"

case "$mode" in
    test)
        export REQUIRE_GPU=1
        args=("$@")
        each test plain
        ;;
    sanitize)
        export REQUIRE_GPU=1
        args=("$@")
        sanitize
        ;;
    choice)
        "$bundle/bench/ops" --energy off --sweep matmul --sweep grouped --sweep attention --check-choice --every 11 "$@"
        ;;
    bench)
        (($# > 0)) || fail "bench OUTDIR [ARGS]"
        bench "$@"
        ;;
    scaling)
        (($# == 1)) || fail "scaling OUTDIR"
        scaling "$1"
        ;;
    example)
        (($# > 0)) || fail "which example? There are: $(ls "$bundle/example")"
        name="$1"
        shift
        [[ -f "$bundle/example/$name" ]] || fail "no example $name; there are: $(ls "$bundle/example" | tr '\n' ' ')"
        exec "$bundle/example/$name" "$@"
        ;;
    all)
        (($# == 1)) || fail "all OUTDIR"
        all "$1"
        ;;
esac
