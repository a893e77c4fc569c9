#!/usr/bin/env bash
# Runs every finding of this folder, goes on where one fails, and prints a summary.
# PYTHON names the interpreter (python3.13); each script makes an environment of its own.
set -uo pipefail
cd "$(dirname "$0")"
differ=()
for script in *.sh; do
    [ "$script" = run_all.sh ] && continue
    echo "== ${script%.sh}"
    bash "$script" || differ+=("${script%.sh}")
done
echo "== ${#differ[@]} of $(($(ls ./*.sh | wc -l) - 1)) differ or failed: ${differ[*]:-none}"
[ ${#differ[@]} -eq 0 ]
