#!/bin/sh
# Prolog= of slurm.conf: the node's agent holds the job's share from here on.
# Slurm gives prologs no search path. A status other than 0 drains the node: only a missing agent is worth that.
PATH=${COTENANT_PATH:-/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin}
export PATH
exec cotenant slurm prolog --dir "${COTENANT_DIR:-/run/cotenant}"
