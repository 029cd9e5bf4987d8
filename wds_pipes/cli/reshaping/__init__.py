"""The commands that write the samples of shards in another order, or divided otherwise.

One idea carries them: an order of the samples of all input shards, by their numbers, is divided
into output shards, each of which is a task.

Rules:
1. The order is a function of the arguments and the inputs, so each share of the tasks finds the
   same one. A task gets a range of its places, or their numbers.
2. A sample takes the bytes from its first header to that of the next sample. ``--max-bytes`` counts
   these, so an input with longer headers than ours makes smaller shards.
3. The samples of a task are read in windows of limited size, each in the order of the input.

- ``commands``: what the command line is. ``orders``: sorted and mixed orders.
- ``plan``: where the samples are, how they are read in any order, and their division into tasks.
"""
