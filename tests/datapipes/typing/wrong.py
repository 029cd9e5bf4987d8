"""A user's file with mistakes: each line with the error codes that mypy and pyright must report."""

import wds_pipes as wp

shards = wp.ShardList("a.tar", shufle=True)  # mypy: call-arg, pyright: reportCallIssue
samples = shards.open_shards().load_tar().group_by_key()
wp.ShardList(3)  # mypy: arg-type, pyright: reportArgumentType
wp.ShardList("a.tar", True)  # mypy: call-arg, pyright: reportCallIssue
samples.shuffle_buffer("1000")  # mypy: arg-type, pyright: reportArgumentType
samples.shuffle_buffer()  # mypy: call-arg, pyright: reportCallIssue
samples.shuffle_buffer(1000, sede=1)  # mypy: call-arg, pyright: reportCallIssue
samples.batch_samples(8, drop_last="no")  # mypy: arg-type, pyright: reportArgumentType
samples.to_tuple("jpg", 3)  # mypy: arg-type, pyright: reportArgumentType
samples.filter_samples(lambda sample: sample.nothing)  # mypy: attr-defined, pyright: reportAttributeAccessIssue
wp.mix([samples, samples])  # mypy: arg-type, pyright: reportArgumentType
wp.PipeLoader(samples, batchsize=8)  # mypy: call-arg, pyright: reportCallIssue
members: wp.WdsPipe[bytes] = samples  # mypy: assignment, pyright: reportAssignmentType
samples.load_state_dict("state")  # mypy: arg-type, pyright: reportArgumentType
