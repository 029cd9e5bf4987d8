"""Read remote shards ahead, through several connections at once.

Two threads take part: the consumer, which iterates a pipe, and fsspec's event loop, which fetches.

- ``budget``: a process has one ``Budget``, the connections and the bytes that all its pipes share.
  A ``Client`` is what one pipe has there: its stores, its options and its counts.
- ``queue``: a ``ReadQueue`` holds shards that are read one after another: the shards of a lane, or
  of one of several shards that are read in turn. It decides what is requested next. A ``Fetch`` is
  the event loop's side of a shard, and a ``RemoteShard`` the consumer's side, a stream; a ``Block``
  is a byte range, whose chunks pass to the consumer, and whose task makes the requests for it.
- ``stores``, ``file_systems``, ``responses``: how requests are sent to stores, and
  what their responses and errors mean.
- ``metadata``: listings, sizes and what else is not read as a shard.

Rules:
1. Queues share the connections and bytes of the budget equally, and none gets more than its own
   pipe has requested. A queue with several connections requests byte ranges, and those of the next
   shard before one has ended; a queue with one connection requests all the rest of a shard at once,
   which leaves no pause between requests.
2. A request continues only while its queue holds less than its share of the bytes. What the
   consumer waits for is always read: so nothing hangs for lack of room, and a queue holds no more
   than its share and one chunk.
3. Every response is checked: where it begins, how long it is, whether the object is still the same.
   After an interruption, the rest is requested from the byte reached.
4. The blocks of a shard follow each other without a gap, and the next one starts where the last one
   stops. A block that is done without an error has all bytes up to its ``stop``; ``stop`` is None
   only where it is not known before the response ends. So a shard that is not at its end always has
   a block that is fetched, an error, or something to request.
5. A block ends with all its bytes, or with an error after ``timeout_seconds`` without
   progress. Progress is 1 KB a second on average over that time: a byte now and then is none. The
   time in which the consumer leaves no room does not count.
6. A range that is read alone (with ``stop``) may have several requests at once, when the first one
   stalls. All are checked against the same object. The first that gets bytes is used, and the
   others are cancelled; an error of a second request is ignored, and one of the first request is
   final, as if there were no second one. So the clock decides how many requests are made, and never
   which bytes come out.
7. The event loop owns everything, except the chunks that wait for the consumer: both threads use
   these, their sums, and the rows of blocks and shards, and only with the budget's lock. Chunks
   enter and leave through ``add``, ``take`` and ``drop`` of their block; the consumer reaches them
   through ``take`` of the fetch. The lock is one of C, taken by ``with``: Ctrl-C
   cannot leave it held.
"""
