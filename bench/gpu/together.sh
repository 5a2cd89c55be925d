#!/bin/bash
# Several measuring scripts at once, each on a GPU of its own: together.sh OUT "SCRIPT STEPS" "SCRIPT STEPS;SCRIPT STEPS" ...
# One argument per GPU; scripts separated by ';' run one after the other there. A STEPS of '+N' first gives the script the N-th GPU as
# a second one. Results and logs go to OUT/SCRIPT.GPU.*.
out=$1; shift
mapfile -t gpus < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
export PYTHONPATH=src PYTHONUNBUFFERED=1 limit=${LIMIT_S:-540}
began=$SECONDS
for ((i = 1; i <= $#; i++)); do
    (
        export CUDA_VISIBLE_DEVICES=${gpus[i-1]}
        IFS=';' read -ra jobs <<< "${!i}"
        for job in "${jobs[@]}"; do
            read -r script steps second <<< "$job"
            export COTENANT_SECOND_GPU=${second:+${gpus[second]}}
            left=$((limit - SECONDS + began))
            [ "$left" -gt 0 ] || break
            timeout "$left" python3 "bench/gpu/$script.py" "$out/$script.$((i-1)).json" $steps > "$out/$script.$((i-1)).log" 2>&1
            echo "$script on GPU $((i-1)): exit $? after $((SECONDS - began)) s"
        done
    ) &
done
wait
