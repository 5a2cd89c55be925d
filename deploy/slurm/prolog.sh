#!/bin/sh
# For Prolog= in slurm.conf: reserves the share of the job on the node's agent.
# A status other than 0 drains the node, so only a missing agent causes one.
# Slurm runs prologs without a search path and without slurmd's environment, so settings come from a file of root.
PATH=/opt/cotenant/bin:/usr/local/bin:/usr/bin:/bin COTENANT_DIR=/run/cotenant
[ -r /etc/cotenant/slurm.env ] && . /etc/cotenant/slurm.env
case "$SLURM_JOB_COMMENT" in
*[Cc][Oo]*[Tt]*[Nn]*[:=]* | *[Tt]*[Nn]*[RrLlMmPp]*=*) ;; # a request, or a misspelt one, which Python reports
*) rm -f "$COTENANT_DIR/slurm-$SLURM_JOB_ID.job" && exit 0 ;; # no request: end without starting Python
esac
PATH=${COTENANT_PATH:-$PATH}
export PATH COTENANT_DIR ${COTENANT_CACHE:+COTENANT_CACHE}
exec cotenant slurm prolog --dir "$COTENANT_DIR"
