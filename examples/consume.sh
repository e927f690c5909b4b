#!/bin/sh
# Consume a queue from a shell script: get, do the work, done or fail.
#
#     sh examples/consume.sh [DIR]
#
# TQ is the command (default: python3 -m tiny_queue; this checkout is searched
# too). Without DIR a temporary queue with three jobs is made and used up. A job
# that this script's end leaves unsettled comes again when its lease ends.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$root
export PYTHONPATH
TQ=${TQ:-python3 -m tiny_queue}

if [ $# -gt 0 ]; then
    queue=$1
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    queue=$folder/jobs
    printf '%s\n' '{"word": "bread"}' '{"word": ""}' '{"word": "jam"}' |
        $TQ put "$queue" - >/dev/null
fi

field() { # of the JSON object on standard input, as text
    python3 -c '
import functools, json, sys
job = json.load(sys.stdin)
print(functools.reduce(lambda value, key: value[key], sys.argv[1:], job))' "$@"
}

handle() { # the work itself: its exit status says whether it was done
    [ -n "$1" ] && echo "handled $1"
}

while job=$($TQ get "$queue" --lease 10m); do
    id=$(printf '%s' "$job" | field id)
    token=$(printf '%s' "$job" | field token)
    if handle "$(printf '%s' "$job" | field payload word)"; then
        $TQ done "$queue" "$id" "$token"
    else
        $TQ fail "$queue" "$id" "$token" --error "no word" --dead
    fi
done

$TQ stats "$queue"
