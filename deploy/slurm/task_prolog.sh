#!/bin/sh
# TaskProlog= of slurm.conf: prints what the task is started with. A status other than 0 ends the task, not the node.
PATH=${COTENANT_PATH:-/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin}
export PATH
exec cotenant slurm task-prolog --dir "${COTENANT_DIR:-/run/cotenant}"
