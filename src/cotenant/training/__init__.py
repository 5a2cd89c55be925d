"""Code that runs inside a training job: the loop, its checkpoints, and its lease (what the job may use until when). It
needs only the standard library, and uses torch if the program does."""
