#!/bin/sh
# From nothing to the two drafters of the default model:
#
#   scripts/train_default.sh FOLDER [PROMPTS.jsonl]
#
# FOLDER receives corpora, features and drafters (about 10 GB). PROMPTS.jsonl holds one prompt a
# line ({"id", "category", "messages"}); without it the model asks itself everything. Every step
# goes on where it was stopped, so kill this at any time and start it again. docs/training.md has
# the times. Settings, from the environment:
#
#   SELF_PROMPTS=500       questions of each kind that the model asks itself
#   DFLASH_MINUTES=240     training of the first drafter
#   SECOND_MINUTES=120     training of the variable-prefix drafter, which starts from the first
#   OPENBLAS_NUM_THREADS   1 (default): half the speed of 2 cores, but other programs do not hurt
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$root/scripts/_venv.sh"
[ $# -ge 1 ] || fail "usage: scripts/train_default.sh FOLDER [PROMPTS.jsonl]"
venv_ready "plot"
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd -P)
python=$venv/bin/python

export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
# glibc would give every large array back to the system and fetch it again: a sixth of the time.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 \
    MALLOC_TOP_PAD_=268435456

set -- "${2:-}"
if [ -n "$1" ]; then
    "$python" -m dflash_mlx.corpus --prompts "$1" --out "$folder/answers.jsonl"
fi
for kind in code chat; do
    "$python" -m dflash_mlx.corpus --self-prompt "${SELF_PROMPTS:-500}" \
        --openings "$root/scripts/openings/$kind.json" --out "$folder/$kind.jsonl"
done
set --
for corpus in answers code chat; do
    [ ! -e "$folder/$corpus.jsonl" ] || set -- "$@" --corpus "$folder/$corpus.jsonl"
done
set -- "$@" --cache "$folder/features"

"$python" -m dflash_mlx.train --mode dflash --out "$folder/dflash" \
    --minutes "${DFLASH_MINUTES:-240}" --short-share 0.75 --plot "$folder/dflash.png" "$@"
"$python" -m dflash_mlx.train --mode variable-prefix --init "$folder/dflash" \
    --out "$folder/variable-prefix" --minutes "${SECOND_MINUTES:-120}" --learning-rate 5e-4 \
    --plot "$folder/variable-prefix.png" "$@"
"$python" -m dflash_mlx.train.compare --drafter "$folder/dflash" \
    --drafter "$folder/variable-prefix" "$@"
