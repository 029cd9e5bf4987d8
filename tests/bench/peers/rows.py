"""What is compared, and what is measured of each."""

from typing import NamedTuple


class Row(NamedTuple):
    """A library with a way to use it, or a limit of the machine.

    Args:
        name: as the table shows it.
        adapter: ``module:class`` in ``adapters/``.
        reads: what it reads. What is not "tar" was converted by the library's own writer before.
        packages: what pip installs for it, the library first.
        own_environment: its requirements clash with those of other rows.
        only: the one kind of measurement that differs from that of the row before, if it is one.
        with_package: it runs with this package. The others see only the adapters.
    """

    name: str
    adapter: str
    reads: str
    packages: tuple[str, ...] = ()
    own_environment: bool = False
    only: str = ""
    with_package: bool = False


QUICK = (  # what every environment for development has
    Row("limit: reading", "limits:Reading", "tar"),
    Row("limit: header walk", "limits:HeaderWalk", "tar"),
    Row("limit: the same function", "limits:Decoding", "memory"),
    Row("limit: decode + resize", "limits:OwnDecoding", "memory", with_package=True),
    Row("wds_pipes", "own:Streamed", "tar", with_package=True),
    Row("wds_pipes, size=(224, 224)", "own:OwnDecoder", "tar", only="decoded", with_package=True),
    Row("wds_pipes, SampleList", "own:Indexed", "tar with index", with_package=True),
    Row("webdataset", "tars:Webdataset", "tar", ("webdataset", "torch", "torchdata")),
    Row('webdataset, .decode("pil")', "tars:WebdatasetPillow", "tar", ("webdataset", "torch"), only="decoded"),
)
ROWS = (
    *QUICK,
    Row("Energon", "energon:Energon", "tar with index", ("megatron-energon", "torch"), own_environment=True),
    Row("HF datasets", "tars:HuggingFace", "tar", ("datasets", "torch")),
    Row("torchdata.nodes over tarfile", "tars:Nodes", "tar", ("torchdata", "torch")),
    Row("spdl", "tars:Spdl", "tar", ("spdl",)),
    Row("DALI (CPU)", "dali:Dali", "tar with index", ("nvidia-dali-cuda120",), own_environment=True),
    Row("Mosaic Streaming", "converted:Mosaic", "MDS", ("mosaicml-streaming", "torch"), own_environment=True),
    Row("LitData", "converted:LitData", "LitData", ("litdata", "torch")),
    Row("Grain", "converted:Grain", "ArrayRecord", ("grain", "array-record"), own_environment=True),
    Row("TFRecord (tfrecord)", "converted:TfRecord", "TFRecord", ("tfrecord", "torch")),
    Row("LMDB", "converted:Lmdb", "LMDB", ("lmdb", "torch")),
    Row("directory of files", "converted:ImageFolder", "one file per sample", ("torch",)),
)
EVERYWHERE = ("numpy", "pillow", "simplejpeg")  # what every environment has, for the shared function

COLUMNS = {  # the title of each measurement that rounds repeat
    "raw images": "raw, images",
    "raw tiny": "raw, tiny",
    "shuffled tiny": "shuffled, tiny",
    "decoded": "decoded, 1 process",
    "decoded workers": "decoded, 2 workers",
    "decoded threads": "decoded, 2 threads",
    "access images": "random access, images",
    "resume": "first batch after a resume",
}
STATE = "save"  # the size of the state: once for each row, before it is resumed
MEMORY = "decoded workers"  # the measurement whose peak memory the table shows

RATIOS = {  # what, over what, of which measurement; and the least that it must be, if there is a bar
    ("wds_pipes", "limit: the same function", "decoded workers"): 0.95,
    ("wds_pipes", "limit: the same function", "decoded threads"): 0.95,
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded workers"): 0.95,
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded threads"): 0.95,
    ("wds_pipes", "webdataset", "decoded workers"): 1.15,
    ("wds_pipes, size=(224, 224)", 'webdataset, .decode("pil")', "decoded workers"): 1.9,
    ("wds_pipes", "limit: header walk", "raw tiny"): 0.45,
    ("wds_pipes", "webdataset", "raw tiny"): 10,
    ("wds_pipes", "webdataset", "raw images"): 4.5,
    ("wds_pipes", "webdataset", "shuffled tiny"): None,
}
