#!/bin/sh
# TaskProlog= of slurm.conf: prints what the task is started with. A status other than 0 ends the task, not the node.
# It runs in the user's environment, whose settings and Python packages do not count here.
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONINSPECT PYTHONUSERBASE
export PYTHONNOUSERSITE=1
COTENANT_DIR=/run/cotenant COTENANT_PATH= COTENANT_CACHE=
[ -r /etc/cotenant/slurm.env ] && . /etc/cotenant/slurm.env
[ -e "$COTENANT_DIR/slurm-$SLURM_JOB_ID.job" ] || exit 0 # the job asked for nothing
PATH=${COTENANT_PATH:-/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin}
export PATH COTENANT_DIR
cotenant slurm task-prolog --dir "$COTENANT_DIR"
status=$?
[ $status -lt 126 ] || echo "print cotenant: the task prolog cannot be run on $(hostname): is COTENANT_PATH right?"
exit $status
