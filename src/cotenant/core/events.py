"""Kinds of events in a record, and the reasons they carry. The codes are what compiled kernels write."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What happened to a job."""

    ARRIVE = 0  #: became known to the scheduler
    START = 1  #: got its share for the first time
    RESUME = 2  #: got a share again after waiting
    MOVE = 3  #: kept running on other GPUs
    RESIZE = 4  #: kept its GPUs; CPU or memory changed
    PREEMPT = 5  #: lost its share, unfinished
    FINISH = 6  #: all work done; its share is free
    WAIT = 7  #: was considered and did not get a share
    PROFILE = 8  #: began to be measured (partition policies)
    REPARTITION = 9  #: its GPU changes its partition
    REJECT = 10  #: will never run here


class Reason(IntEnum):
    """Why it happened."""

    NONE = 0
    GPUS_FULL = 1  #: every GPU is held by jobs earlier in the order
    GANG_TOO_LARGE_NOW = 2  #: some GPUs are free, fewer than the gang needs
    NO_CPU_OR_MEMORY = 3  #: GPUs are free but no node has its CPU or memory beside them
    NO_GPU_OF_MODEL = 4  #: free GPUs are not of a model it accepts
    IN_ORDER = 5  #: its turn in the ordering
    RESERVED = 6  #: waited longer than the reservation time and went first
    GAVE_WAY = 7  #: gave CPU and memory above its proportional share back to others
    GOT_IDEAL = 8  #: CPU and memory for its ideal speed became free
    REPLACED = 9  #: everything was placed anew this round
    OUTRANKED = 10  #: jobs earlier in the order took its GPUs
    DONE = 11
    NEW_LAYOUT = 12  #: its GPU got another MIG layout
    MEASURED = 13  #: its GPU was switched to MPS to measure the jobs on it
    BELOW_FLOOR = 14  #: no slice that is free there keeps its QoS floor
    FAILED = 15  #: its processes failed
    LOST = 16  #: its node, or what ran it there, was lost
    CANCELLED = 17  #: its user took it back
    TAKEN_DOWN = 18  #: the fleet was taken down; it goes on with the next one
    KILLED = 19  #: it did not leave within its grace: work since its last checkpoint is lost
    NOT_CHOSEN = 20  #: the policy gave the GPUs to others, that gain more by them
    OTHER_SPEED = 21  #: its own progress, or the job beside it, changed its speed
