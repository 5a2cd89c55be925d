#!/bin/sh
# Prolog= of slurm.conf: the node's agent holds the job's share from here on.
# A status other than 0 drains the node: only a missing agent is worth that.
# Slurm gives prologs no search path and none of slurmd's environment: settings come from root's file.
PATH=/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin COTENANT_DIR=/run/cotenant
[ -r /etc/cotenant/slurm.env ] && . /etc/cotenant/slurm.env
case "$SLURM_JOB_COMMENT" in
*[Cc][Oo]*[Tt]*[Nn]*[:=]* | *[Tt]*[Nn]*[RrLlMmPp]*=*) ;; # a request, or nearly one
*) rm -f "$COTENANT_DIR/slurm-$SLURM_JOB_ID.job" && exit 0 ;; # without starting Python
esac
PATH=${COTENANT_PATH:-$PATH}
export PATH COTENANT_DIR ${COTENANT_CACHE:+COTENANT_CACHE}
exec cotenant slurm prolog --dir "$COTENANT_DIR"
