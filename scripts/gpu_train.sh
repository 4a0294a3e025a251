#!/usr/bin/env bash
# Trains a head on a machine without a network, with its own Python and torch.
#   scripts/gpu_train.sh carry DIR MODEL.gguf EVAL.jsonl[,EVAL.jsonl] [PROMPTS.jsonl]
#       what must travel there: DIR/base (wheels, prompts) and the model in three parts, since one journey
#       takes 64 MiB and the tree travels along: DIR/model0, DIR/model1 and DIR/model2
# and there, with CARRY naming the directory in which these lie:
#   scripts/gpu_train.sh check            attention kernels: needs no model
#   scripts/gpu_train.sh smoke            15 s of texts, a minute of training
#   scripts/gpu_train.sh stretch DATA_MINUTES TRAIN_MINUTES [options of `foreword train eagle3`]
#   scripts/gpu_train.sh compare DATA_MINUTES TRAIN_MINUTES [METHOD ...]
#       each method (medusa draft exit dflash unless they are named) for so long on the same texts; 0 minutes of
#       texts: those that are there. Each takes about half a minute more to load, compile, measure and write.
# Texts and states stay in build/training, which a warm machine keeps; what was trained goes to $OUT in pieces:
# of `compare` with cards and logs, matrices in 8 bits: cat export.tgz.* | tar xz, then `foreword train join`.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
CARRY=${CARRY:-carry}
WORK=build/training

if [ "${1:-}" = carry ]; then
    DIR=$2
    mkdir -p "$DIR/base/wheels" "$DIR/base/eval" "$DIR/base/prompts" "$DIR"/model{0,1,2}
    "$PYTHON" -m pip download --quiet --dest "$DIR/base/wheels" --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform any \
        --constraint <(grep -v '^torch' constraints.txt) \
        annotated-doc annotated-types click gguf httpx2 iniconfig jinja2 markdown-it-py markupsafe mdurl packaging platformdirs \
        pluggy pydantic pydantic-core pygments pytest pyyaml rich shellingham tqdm typer typing-extensions typing-inspection
    basename "$3" > "$DIR/base/model_name" # cards name it
    split -n 3 -d -a 1 "$3" "$DIR/part"
    for part in 0 1 2; do mv "$DIR/part$part" "$DIR/model$part/part"; done
    cp ${4//,/ } "$DIR/base/eval/"
    if [ -n "${5:-}" ]; then cp "$5" "$DIR/base/prompts/"; fi
    du -sh "$DIR"/*
    exit
fi

OUT=${OUT:-build/out}
mkdir -p "$WORK/cache" "$OUT"
PACKAGES=$PWD/$WORK/packages
if [ ! -d "$PACKAGES" ]; then
    "$PYTHON" -c 'import sys, zipfile; [zipfile.ZipFile(wheel).extractall(sys.argv[1]) for wheel in sys.argv[2:]]' \
        "$PACKAGES" "$CARRY"/base/wheels/*.whl
fi
export PYTHONPATH="$PWD/src:$PACKAGES" PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR="$PWD/$WORK/cache/inductor" TRITON_CACHE_DIR="$PWD/$WORK/cache/triton"
foreword() { "$PYTHON" -m foreword "$@"; }

if [ "${1:-}" = check ]; then
    "$PYTHON" -m pytest -q -p no:cacheprovider -W ignore tests/unit/train/passes/test_attention.py
    exit
fi

MODEL=$WORK/$(cat "$CARRY/base/model_name" 2> /dev/null || echo model.gguf)
if [ ! -f "$MODEL" ]; then
    cat "$CARRY"/model{0,1,2}/part > "$MODEL.part"
    mv "$MODEL.part" "$MODEL"
fi
EVAL=() && for file in "$CARRY"/base/eval/*.jsonl; do if [ -f "$file" ]; then EVAL+=(--eval "$file"); fi; done
PROMPTS=() && for file in "$CARRY"/base/prompts/*.jsonl; do if [ -f "$file" ]; then PROMPTS+=(--prompts "$file"); fi; done

# A machine begins with an empty directory: without a SEED of its own it writes what the one before has written.
write_texts() { foreword train data "$WORK/texts" --model "$MODEL" "${PROMPTS[@]}" ${SEED:+--seed "$SEED"} "$@"; }

case "${1:-}" in
smoke)
    write_texts --minutes 0.25
    foreword train data "$WORK/texts" --model "$MODEL" --show 24 > "$OUT/texts.txt"
    rm -rf "$WORK/smoke"
    foreword train eagle3 --model "$MODEL" --data "$WORK/texts" --out "$WORK/smoke" --minutes 1 --evaluate-every 25 \
        --export "$OUT/pieces" "${EVAL[@]}" "${@:2}"
    ;;
stretch)
    if [ "$2" != 0 ]; then write_texts --minutes "$2"; fi
    RESUME=() && if [ -f "$WORK/head/training/state.pt" ]; then RESUME=(--resume); fi
    foreword train eagle3 --model "$MODEL" --data "$WORK/texts" --out "$WORK/head" --minutes "$3" "${RESUME[@]}" \
        --export "$OUT/pieces" "${EVAL[@]}" "${@:4}"
    cp "$WORK/head/training/log.jsonl" "$OUT/"
    ;;
compare)
    exec > >(tee -a "$OUT/log.txt") 2>&1
    METHODS=("${@:4}")
    if [ ${#METHODS[@]} = 0 ]; then METHODS=(medusa draft exit dflash); fi
    if [ "$2" != 0 ]; then write_texts --minutes "$2"; fi
    for method in "${METHODS[@]}"; do
        echo "== $method"
        rm -rf "${WORK:?}/$method" "$WORK/export/$method"
        SHAPE=() && if [ "$method" = medusa ]; then SHAPE=(--heads 3); fi # four would not fit into what comes back
        foreword train "$method" "${SHAPE[@]}" --model "$MODEL" --data "$WORK/texts" --out "$WORK/$method" --minutes "$3" \
            --evaluate-every 40 --export "$WORK/export/$method" --export-bits 8 "${EVAL[@]}" || continue
        cp "$WORK/$method/training/log.jsonl" "$WORK/$method/README.md" "$WORK/export/$method/"
        rm -f "$OUT"/export.tgz.* # the next method may run out of time: all that is done is always there
        tar -C "$WORK" -c export | gzip -1 | split -b 15000000 - "$OUT/export.tgz."
    done
    ;;
*)
    echo "usage: see the head of $0" >&2
    exit 2
    ;;
esac
