"""Code that runs inside a training job: the loop, checkpoints, the lease. It needs only the standard library, and uses
torch if the program does."""
