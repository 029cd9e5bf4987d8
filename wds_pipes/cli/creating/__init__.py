"""What ``wds-pipes create`` reads, and how it divides samples into shards."""
