"""Remote shards: read ahead, through several connections at once."""
