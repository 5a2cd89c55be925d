#!/bin/sh
# For TaskProlog= in slurm.conf: prints the environment with which the task starts. A status other than 0 ends the task
# and does not drain the node. It runs in the user's environment, but ignores the user's settings and Python packages.
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONINSPECT PYTHONUSERBASE
export PYTHONNOUSERSITE=1
COTENANT_DIR=/run/cotenant COTENANT_PATH= COTENANT_CACHE=
[ -r /etc/cotenant/slurm.env ] && . /etc/cotenant/slurm.env
[ -e "$COTENANT_DIR/slurm-$SLURM_JOB_ID.job" ] || exit 0 # the job requested no share
PATH=${COTENANT_PATH:-/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin}
export PATH COTENANT_DIR
cotenant slurm task-prolog --dir "$COTENANT_DIR"
status=$?
[ $status -lt 126 ] || echo "print cotenant: the task prolog cannot be run on $(hostname): is COTENANT_PATH right?"
exit $status
