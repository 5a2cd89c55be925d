#!/bin/bash
# The LLM simulator against an engine on one GPU: llm_fidelity.sh OUT [SHAPE]. SHAPE: 4b (default), 8b, or tiny (small_llm.py on a CPU).
# ENGINE: small (default) is small_llm.py, which has no chunked prefill, so --step-tokens is what all its slots hold; vllm is an
# unmodified vLLM (vllm_engine.py), with ENGINE_SITE where it is not installed. PYTHON names the interpreter.
set -e
out=$1 shape=${2:-4b} python=${PYTHON:-python3} kind=${ENGINE:-small} here=$(dirname "$0")
mkdir -p "$out"
rm -f "$out/profile.json"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# an engine may take a minute to start, so what the commands below need is imported first
if ! said=$("$python" -c 'import httptools, cotenant.cli.main, cotenant.bench.llm_fidelity, cotenant.workloads.llm.registry' 2>&1); then
    echo "llm_fidelity.sh: $python lacks a module: ${said##*$'\n'}" >&2
    exit 1
fi
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
if [ "$kind" = vllm ]; then
    name=qwen3-$shape rates=2,4,8
    read -ra limits <<< "$("$python" "$here/vllm_engine.py" limits "$shape")"
    command=("$here/vllm_engine.py" serve "$shape" "$port" "$name" "$out/model")
else
    case $shape in 4b) slots=32 length=2432 ;; 8b) slots=8 length=2432 ;; *) slots=8 length=512 ;; esac
    name=small rates=1,2,4 limits=(--max-sequences $slots --kv-tokens $((slots * length)) --step-tokens $((slots * length)))
    command=("$here/small_llm.py" --port "$port" --shape "$shape")
fi
"$python" "${command[@]}" > "$out/engine.log" 2>&1 &
engine=$! url=http://127.0.0.1:$port
trap 'kill $engine' EXIT
until "$python" -c "import urllib.request as u; u.urlopen('$url/v1/models', timeout=5)" 2> /dev/null; do
    kill -0 $engine
    sleep 0.2
done
echo "the engine answers after $SECONDS s"
"$python" -m cotenant profile llm "$url" --model "$name" --endpoint chat --rounds "${ROUNDS:-3}" --out "$out/profile.json" --gpu H200 \
    "${limits[@]}"
echo "profiled after $SECONDS s"
"$python" -m cotenant bench llm --url "$url" --model "$name" --endpoint chat --profile "$out/profile.json" --rates "${RATES:-$rates}" \
    --prompt "${PROMPT:-1000~0.5}" --output "${OUTPUT:-128~0.5}" --duration "${DURATION:-15s}" --json > "$out/fidelity.json"
echo "compared after $SECONDS s"
