"""``wds-pipes browse``: the samples of shards as pages of a local server, or as files.

- ``data``: the shards, and ranges of their samples, read in parts, in bounded memory.
- ``fields``: one field for a page: its text, picture or player.
- ``pages``: the pages as HTML, also as files; ``templates`` and ``static`` have their templates,
  style and script.
- ``histograms``: over a random part of the data; ``training``: what a training gets next.
- ``server``: the pages over HTTP, and who may read them.

Rules:
1. Nothing in a sample is trusted. Text is escaped by the templates, images are decoded and encoded
   again, and what could run code is not decoded. The server forbids scripts and styles other than
   its own two files, and requests to other hosts.
2. A request names shards, samples and fields by their numbers. No path and no URL comes from it.
3. A page reads at most ``BUDGET`` bytes of fields, and nothing of it stays in memory.
"""
