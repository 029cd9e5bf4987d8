"""A local cache of remote shards, filled while they are read.

All processes of the machine share it.

Rules:
1. One process at a time downloads a shard, in a thread. Every other reader of that shard, in this
   process or another, reads the file while it grows. When the downloading process dies or stops,
   one of the waiting processes continues from the last byte, if the object is still the same.
2. A file gets its final name only when it is complete. Readers see the end of a shard only after
   its download has ended without an error. Bytes that an earlier download left are returned only
   after the store has confirmed that the object is still the same.
3. A wrong size or checksum is detected at the end. The shard is then downloaded once more, and a
   reader that has already read wrong bytes gets an error.
4. When the disk is full, shards are read directly from the store.
5. A shard is kept only if its completeness is confirmed: by a checksum; or by a beginning that
   looks like a tar or a compressed file, together with a length from the store or an index.
   Anything else (a login page, a response without a length) is passed to its reader and not kept.
"""
