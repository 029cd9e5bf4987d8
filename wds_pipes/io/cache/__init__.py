"""A local cache of remote shards: stored while they are read, once per machine.

Rules:
1. One process at a time downloads a shard, in a thread; who else reads it, in any process, reads the file as it grows. When that process dies or stops, one
   that waits goes on from the byte reached, if the object is still the same.
2. A file is complete when it has its final name, and its end is given only then. Nothing is given from what an earlier download has left before the store
   has said that it is still the same object.
3. A wrong size or checksum is seen at the end. The shard is then downloaded once more, and who has read wrong bytes of it gets an error.
4. Where the disk is full, shards are read straight from the store.
5. Only what something vouches for is stored: a checksum; or a beginning like that of a tar or of a compressed one, and a length that the store or an index
   tells, or the end mark of the tar and that of its compression. Anything else (a page that asks for a password, an answer that was cut and had no length) is
   given to its reader and forgotten.
"""
