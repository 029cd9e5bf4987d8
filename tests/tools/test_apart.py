"""The tools stand apart: training needs none of them."""

from scripts import run_code

ONLY_TOOLS = ("wds_pipes.tools", "wds_pipes.cli", "click", "duckdb", "lmdb", "pyarrow", "ray", "tqdm")


def test_a_pipeline_imports_neither_the_tools_nor_their_libraries(urls):
    code = f"""
        import contextlib, sys
        for name in {ONLY_TOOLS!r}:
            sys.modules[name] = None
        import wds_pipes as wp
        pipe = wp.ShardList(sys.argv[1:], shuffle=True).open_shards().load_tar().group_by_key(fields=["txt", "json"])
        pipe = pipe.shuffle_buffer(10).decode_by_ext().to_tuple("txt", "json")
        with contextlib.closing(wp.PipeLoader(pipe, batch_size=2, num_workers=0)) as loader:
            next(iter(loader))
            state = loader.state_dict()
            loader.load_state_dict(state)
            print(1 + len(list(loader)))
        print(wp.describe_state(state)[:5])
    """
    assert run_code(code, *urls).splitlines()[0] == "7"
