"""PipeLoader, its lanes and its processes; and what the other hosts need of processes.

- ``pipe_loader`` is the class, ``plan`` how epochs are divided, ``progress`` what the loader and its iterators share, ``iterator`` one iteration.
- ``workers`` starts and ends the processes, ``commands`` tells them what to do, ``worker`` is their side, ``protocol`` what both sides send.
- ``lanes`` divides an epoch over lanes, ``parts`` runs what a lane got, ``lengths`` says how many items that is, ``stats`` where the time goes.
- ``merging`` makes one state of those of all ranks; ``gathering`` and ``checkpoint_files`` serve ``wds_pipes.checkpoint``.
- ``ranks`` and ``parent``: which rank this process is, and which process is its parent.
"""
