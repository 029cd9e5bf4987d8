"""What is compared, and what is measured of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A library with a way to use it, or a limit of the machine.

    Args:
        name: as the table shows it.
        adapter: ``module:class`` in ``adapters/``.
        reads: what it reads. What is not "tar" was converted by the library's own writer before.
        packages: what pip installs for it, the library first.
        own_environment: its requirements clash with those of other rows.
        only: the one method of its adapter that differs from that of the row before, if it is one.
        with_package: it runs with this package. The others see only the adapters.
    """

    name: str
    adapter: str
    reads: str
    packages: tuple[str, ...] = ()
    own_environment: bool = False
    only: str = ""
    with_package: bool = False


@dataclass(frozen=True)
class Measurement:
    """A column of the table.

    Args:
        name: as ``measuring.measure`` knows it.
        title: as the table shows it.
    """

    name: str
    title: str


LIMITS = (
    Row("limit: reading", "limits:Reading", "tar"),
    Row("limit: header walk", "limits:HeaderWalk", "tar"),
    Row("limit: the same function", "limits:Decoding", "memory"),
    Row("limit: decode + resize", "limits:OwnDecoding", "memory", with_package=True),
)
OURS = (
    Row("wds_pipes", "own:Streamed", "tar", with_package=True),
    Row("wds_pipes, size=(224, 224)", "own:OwnDecoder", "tar", only="decoded", with_package=True),
    Row("wds_pipes, SampleList", "own:Indexed", "tar with index", with_package=True),
)
WEBDATASET = (
    Row("webdataset", "tars:Webdataset", "tar", ("webdataset", "torch", "torchdata")),
    Row('webdataset, .decode("pil")', "tars:WebdatasetPillow", "tar", ("webdataset", "torch"), only="decoded"),
)
OTHERS = (
    Row("Energon", "energon:Energon", "tar with index", ("megatron-energon", "torch"), own_environment=True),
    Row("HF datasets", "tars:HuggingFace", "tar", ("datasets", "torch")),
    Row("torchdata.nodes over tarfile", "tars:Nodes", "tar", ("torchdata", "torch")),
    Row("spdl", "tars:Spdl", "tar", ("spdl",)),
    Row("DALI (CPU)", "dali:Dali", "tar with index", ("nvidia-dali-cuda120",), own_environment=True),
    Row("Mosaic Streaming", "converted:Mosaic", "MDS", ("mosaicml-streaming", "torch"), own_environment=True),
    Row("LitData", "converted:LitData", "LitData", ("litdata", "torch")),
    Row("Grain", "converted:Grain", "ArrayRecord", ("grain", "array-record"), own_environment=True),
    Row("FFCV", "converted:Ffcv", "beton", ("ffcv", "torch"), own_environment=True),
    Row("TFRecord (tfrecord)", "converted:TfRecord", "TFRecord", ("tfrecord", "torch")),
    Row("LMDB", "converted:Lmdb", "LMDB", ("lmdb", "torch")),
    Row("directory of files", "files:ImageFolder", "one file per sample", ("torch",)),
)
ROWS = (*LIMITS, *OURS, *WEBDATASET, *OTHERS)
QUICK = (*LIMITS, *OURS, *WEBDATASET)

MEASUREMENTS = (
    Measurement("raw images", "raw, images"),
    Measurement("raw tiny", "raw, tiny"),
    Measurement("shuffled tiny", "shuffled, tiny"),
    Measurement("decoded", "decoded, 1 process"),
    Measurement("decoded workers", "decoded, 2 workers"),
    Measurement("decoded threads", "decoded, 2 threads"),
    Measurement("access images", "random access, images"),
    Measurement("resume", "first batch after a resume"),
)
STATE = Measurement("save", "state")  # once for each row, before it is resumed
MEMORY = "decoded workers"  # the measurement whose peak memory the table shows
EVERYWHERE = ("numpy", "pillow", "simplejpeg")  # what every environment has, for the shared function
