#!/bin/bash
# The LLM simulator against small_llm.py on one GPU: llm_fidelity.sh OUT [SHAPE]. SHAPE: 4b (default), 8b, or tiny (on a CPU).
# small_llm.py has no chunked prefill, so --step-tokens is what all its slots hold. PYTHON names the interpreter.
set -e
out=$1 shape=${2:-4b} python=${PYTHON:-python3} here=$(dirname "$0")
mkdir -p "$out"
rm -f "$out/profile.json"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
case $shape in 4b) slots=32 length=2432 ;; 8b) slots=8 length=2432 ;; *) slots=8 length=512 ;; esac
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$python" "$here/small_llm.py" --port "$port" --shape "$shape" > "$out/engine.log" 2>&1 &
engine=$! url=http://127.0.0.1:$port
trap 'kill $engine' EXIT
until "$python" -c "import urllib.request as u; u.urlopen('$url/v1/models', timeout=5)" 2> /dev/null; do
    kill -0 $engine
    sleep 0.2
done
echo "the engine answers after $SECONDS s"
"$python" -m cotenant profile llm "$url" --model small --endpoint chat --rounds 3 --out "$out/profile.json" --gpu H200 \
    --max-sequences $slots --kv-tokens $((slots * length)) --step-tokens $((slots * length))
echo "profiled after $SECONDS s"
"$python" -m cotenant bench llm --url "$url" --model small --endpoint chat --profile "$out/profile.json" --rates "${RATES:-1,2,4}" \
    --prompt "${PROMPT:-1000~0.5}" --output 128~0.5 --duration "${DURATION:-15s}" --json > "$out/fidelity.json"
echo "compared after $SECONDS s"
