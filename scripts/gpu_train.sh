#!/usr/bin/env bash
# Trains a head on a machine without a network, with its own Python and torch. What else is needed lies in carry/, put
# there by `scripts/gpu_train.sh carry MODEL.gguf [PROMPTS.jsonl ...]`: wheels, the model in two halves (each call may
# carry 64 MiB, so the second half travels with a second call), prompts to measure on.
#   scripts/gpu_train.sh check            versions, attention kernels, speed with random weights: needs no model
#   scripts/gpu_train.sh smoke            15 s of texts, 60 s of training
#   scripts/gpu_train.sh stretch DATA_MINUTES TRAIN_MINUTES [options of `foreword train eagle3`]
# Texts and states stay in build/training, which a warm machine keeps; the head goes to $OUT in pieces.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WORK=build/training

if [ "${1:-}" = carry ]; then
    shift
    rm -rf carry && mkdir -p carry/wheels carry/model0 carry/model1 carry/eval carry/prompts
    "$PYTHON" -m pip download --quiet --dest carry/wheels --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform any \
        --constraint <(grep -v '^torch' constraints.txt) \
        annotated-doc click gguf jinja2 markdown-it-py markupsafe mdurl platformdirs pygments pyyaml rich shellingham tqdm typer typing-extensions
    half=$(($(stat -c %s "$1") / 2))
    head -c $half "$1" > carry/model0/part
    tail -c +$((half + 1)) "$1" > carry/model1/part
    shift
    for file in "$@"; do cp "$file" carry/eval/; done
    du -sh carry/*
    exit
fi

OUT=${OUT:-build/out}
mkdir -p "$WORK/cache" "$OUT"
PACKAGES=$WORK/packages
if [ ! -d "$PACKAGES" ]; then
    "$PYTHON" -c 'import sys, zipfile; [zipfile.ZipFile(wheel).extractall(sys.argv[1]) for wheel in sys.argv[2:]]' \
        "$PACKAGES" carry/wheels/*.whl
fi
export PYTHONPATH="$PWD/src:$PACKAGES" PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR="$PWD/$WORK/cache/inductor" TRITON_CACHE_DIR="$PWD/$WORK/cache/triton"
foreword() { "$PYTHON" -m foreword "$@"; }

if [ "${1:-}" = check ]; then
    nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
    "$PYTHON" scripts/gpu_train_check.py
    exit
fi

MODEL=$WORK/model.gguf
if [ ! -f "$MODEL" ]; then cat carry/model0/part carry/model1/part > "$MODEL.part" && mv "$MODEL.part" "$MODEL"; fi
EVAL=() && for file in carry/eval/*.jsonl; do [ -f "$file" ] && EVAL+=(--eval "$file"); done
PROMPTS=() && for file in carry/prompts/*.jsonl; do [ -f "$file" ] && PROMPTS+=(--prompts "$file"); done

write_texts() { foreword train data "$WORK/texts" --model "$MODEL" --seed "$(date +%s)" "${PROMPTS[@]}" "$@"; }

case "${1:-}" in
smoke)
    write_texts --minutes 0.25
    foreword train eagle3 --model "$MODEL" --data "$WORK/texts" --out "$WORK/head" --minutes 1 --evaluate-every 25 \
        "${EVAL[@]}" "${@:2}"
    ;;
stretch)
    if [ "$2" != 0 ]; then write_texts --minutes "$2"; fi
    foreword train eagle3 --model "$MODEL" --data "$WORK/texts" --out "$WORK/head" --minutes "$3" --resume \
        --export "$OUT" "${EVAL[@]}" "${@:4}"
    cp "$WORK/head/training/log.jsonl" "$OUT/"
    ;;
*) echo "usage: see the head of $0" >&2; exit 2 ;;
esac
