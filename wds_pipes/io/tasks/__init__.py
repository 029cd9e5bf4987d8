"""Jobs that write files: independent tasks, on one machine or on many.

Rules:
1. The outputs of a task are known before it runs. Each appears when it is complete, and running a
   task again gives the same bytes.
2. ``.wds-pipes/plan.json`` in the directory of the outputs says which job it is: the options, and
   for each task its outputs and a fingerprint of what it is made from. It is written before the
   first output. Another plan there is refused, and so are outputs without a plan.
3. When all outputs of a task have their names, its receipt is written: its fingerprint, the sizes
   of the outputs, and what it found. A task is finished if it has a receipt with its fingerprint,
   and its outputs have these sizes. A task that was killed before its receipt is run again.
4. Outputs may be lists of more files that the tasks write into a directory. Another job does not
   begin while anything is there: its plan would not say which of these files are whose.
5. Tasks share nothing but this directory. So each share of them can run anywhere and at any time;
   the one that finds all receipts writes what belongs to the whole, such as ``index.json``.
6. A job may also run twice at once: a task that has a receipt by now is not run, and one whose file
   another process is writing is waited for.
"""
