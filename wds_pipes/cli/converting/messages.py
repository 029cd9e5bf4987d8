"""The protobuf messages in records of other formats, made from the fields that their definitions
list: ``tf.train.Example`` of TensorFlow, and ``TensorProtos`` of Caffe2. TensorFlow and Caffe2 are
not needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from wds_pipes.core.importing import library

# By message: the name, number and type of each field; "*" is repeated, "map" one of ``Feature``.
_EXAMPLE = {
    "BytesList": [("value", 1, "bytes*")],
    "FloatList": [("value", 1, "float*")],
    "Int64List": [("value", 1, "int64*")],
    "Feature": [("bytes_list", 1, "BytesList"), ("float_list", 2, "FloatList"), ("int64_list", 3, "Int64List")],
    "Features": [("feature", 1, "map")],
    # a tf.train.SequenceExample is one that also has lists of features
    "Example": [("features", 1, "Features"), ("feature_lists", 2, "bytes")],
}
_TENSORS = {
    "TensorProto": [
        ("dims", 1, "int64*"),
        ("data_type", 2, "int32"),  # an enum
        ("float_data", 3, "float*"),
        ("int32_data", 4, "int32*"),
        ("byte_data", 5, "bytes"),
        ("string_data", 6, "bytes*"),
        ("name", 7, "string"),
        ("double_data", 9, "double*"),
        ("int64_data", 10, "int64*"),
    ],
    "TensorProtos": [("protos", 1, "TensorProto*")],
}


@cache
def example() -> Any:
    """The class of ``tf.train.Example``."""
    return _classes("example", _EXAMPLE)["Example"]


@cache
def tensor_protos() -> Any:
    """The class of Caffe2's ``TensorProtos``."""
    return _classes("tensors", _TENSORS)["TensorProtos"]


def _classes(package: str, messages: dict[str, list[tuple[str, int, str]]]) -> dict[str, Any]:
    what = "this format"
    descriptors = library("google.protobuf.descriptor_pb2", "protobuf", what, extra="convert")
    pools = library("google.protobuf.descriptor_pool", "protobuf", what, extra="convert")
    factory = library("google.protobuf.message_factory", "protobuf", what, extra="convert")
    # proto3 packs repeated numbers, as the definitions say
    file = descriptors.FileDescriptorProto(
        name=f"wds_pipes/{package}.proto", package=f"wds_pipes.{package}", syntax="proto3"
    )
    kinds = descriptors.FieldDescriptorProto
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            repeated = kind == "map" or kind.endswith("*")
            of, label = kind.rstrip("*"), kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if of == "map":
                entry = message.nested_type.add(name="FeatureEntry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
                value = entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE)
                value.type_name = f".{file.package}.Feature"
                of = f"{name}.FeatureEntry"
            if hasattr(kinds, f"TYPE_{of.upper()}"):
                made.type = getattr(kinds, f"TYPE_{of.upper()}")
            else:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".{file.package}.{of}"
        if name == "Feature":
            message.oneof_decl.add(name="kind")
            for made in message.field:
                made.oneof_index = 0
    pool = pools.DescriptorPool()
    pool.Add(file)
    return {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in messages}
