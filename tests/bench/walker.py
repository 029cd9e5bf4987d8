"""The plain walker: what tight Python needs to walk plain ustar shards, group by key and copy the
payload. No checks, no long names, no state.

The yardstick of the raw benchmarks, not a reader anyone should use.
"""

import io


def walk(path, window=1 << 20):
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw, window) as f:
        read, key, sample = f.read, None, None
        while True:
            head = read(512)
            if len(head) < 512 or head[0] == 0:
                break
            name = head[: head.index(0)].decode()
            length = int(head[124:135], 8)
            data = read(length)
            pad = -length & 511
            if pad:
                read(pad)
            dot = name.find(".", name.rfind("/") + 1)
            if name[:dot] != key:
                if sample is not None:
                    yield sample
                key = name[:dot]
                sample = {"__key__": key}
            sample[name[dot + 1 :]] = data
        if sample is not None:
            yield sample
