#!/bin/sh
# From nothing to the two drafters of the default model, the first with a candidate selector:
#
#   scripts/train_default.sh FOLDER [PROMPTS.jsonl]
#
# FOLDER receives corpora, features and drafters (1 to 2 GB for 1,000 prompts; 10,771 come from
# scripts/prompts unless the settings say otherwise). PROMPTS.jsonl holds one prompt a line ({"id",
# "category", "messages"}), which are added to those. Every step goes on where it was stopped, so
# kill this at any time and start it again. docs/training.md has the times. Settings, from the
# environment:
#
#   OWN_PROMPTS=1          the prompts of this project (scripts/prompts); 0 leaves them out
#   KEEP_CLEAR_OF=         a file of prompts kept for evaluation: of the project's, those are left
#                          out that have a function name or 8 words in a row from it
#   SELF_PROMPTS=500       questions of each kind that the model asks itself
#   DFLASH_MINUTES=240     training of the first drafter
#   SECOND_MINUTES=120     training of the variable-prefix drafter, which starts from the first
#   SELECTOR_MINUTES=20    training of the first drafter's selector, which begins anew when it is
#                          stopped; 0 leaves it out
#   OPENBLAS_NUM_THREADS   1 (default): half the speed of 2 cores, but other programs do not hurt
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
. "$root/scripts/_venv.sh"
[ $# -ge 1 ] || fail "usage: scripts/train_default.sh FOLDER [PROMPTS.jsonl]"
case ${OWN_PROMPTS:-1} in [01]) ;; *) fail "OWN_PROMPTS is $OWN_PROMPTS; choose 1 or 0" ;; esac
venv_ready ""
mkdir -p "$1"
folder=$(CDPATH='' cd -- "$1" && pwd -P)
python=$venv/bin/python

export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
# glibc would give every large array back to the system and fetch it again: a sixth of the time.
export MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=8589934592 \
    MALLOC_TOP_PAD_=268435456

prompts=${2:-}
own=
if [ "${OWN_PROMPTS:-1}" = 1 ]; then
    own=$folder/own-prompts.jsonl
    set -- --prompts "$root/scripts/prompts/made.jsonl" --prompts "$root/scripts/prompts/written.jsonl"
    [ -z "${KEEP_CLEAR_OF:-}" ] || set -- "$@" --of "$KEEP_CLEAR_OF"
    "$python" "$root/scripts/keep_clear.py" "$@" --out "$own"
fi
[ -z "$prompts" ] ||
    "$python" -m dflash_mlx.corpus --prompts "$prompts" --out "$folder/answers.jsonl"
[ -z "$own" ] || "$python" -m dflash_mlx.corpus --prompts "$own" --out "$folder/own.jsonl"
for kind in code chat; do
    "$python" -m dflash_mlx.corpus --self-prompt "${SELF_PROMPTS:-500}" \
        --openings "$root/scripts/openings/$kind.json" --out "$folder/$kind.jsonl"
done
set --
for corpus in answers own code chat; do
    [ ! -e "$folder/$corpus.jsonl" ] || set -- "$@" --corpus "$folder/$corpus.jsonl"
done
set -- "$@" --cache "$folder/features"

"$python" -m dflash_mlx.train --mode dflash --out "$folder/dflash" \
    --minutes "${DFLASH_MINUTES:-240}" --short-share 0.75 "$@"
"$python" -m dflash_mlx.train --mode variable-prefix --init "$folder/dflash" \
    --out "$folder/variable-prefix" --minutes "${SECOND_MINUTES:-120}" --learning-rate 5e-4 "$@"
if [ "${SELECTOR_MINUTES:-20}" != 0 ]; then
    if [ ! "$folder/selected/config.json" -nt "$folder/dflash/model.safetensors" ]; then
        rm -rf "$folder/selected"
        "$python" -m dflash_mlx.train.selector --drafter "$folder/dflash" \
            --out "$folder/selected" --minutes "${SELECTOR_MINUTES:-20}" "$@"
    fi
fi
