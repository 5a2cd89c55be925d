#!/bin/sh
# Epilog= of slurm.conf: the job's share is free again.
PATH=${COTENANT_PATH:-/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin}
export PATH
exec cotenant slurm epilog --dir "${COTENANT_DIR:-/run/cotenant}"
