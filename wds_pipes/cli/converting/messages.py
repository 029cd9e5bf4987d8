"""The protobuf messages in records of other formats, by their published definitions:
``tf.train.Example`` of TensorFlow, and ``TensorProtos`` of Caffe2. TensorFlow and Caffe2 are not
needed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from wds_pipes.core.importing import library

# proto3 packs repeated numbers, as the definitions say. A tf.train.SequenceExample is an Example
# that also has lists of features.
_EXAMPLE = """
name: "wds_pipes/example.proto" package: "wds_pipes" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".wds_pipes.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".wds_pipes.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".wds_pipes.Int64List" oneof_index: 0 }
}
message_type {
  name: "Features"
  nested_type {
    name: "FeatureEntry"
    options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".wds_pipes.Feature" }
  }
  field {
    name: "feature" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".wds_pipes.Features.FeatureEntry"
  }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".wds_pipes.Features" }
  field { name: "feature_lists" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
}
"""
_TENSORS = """
name: "wds_pipes/tensors.proto" package: "wds_pipes" syntax: "proto3"
message_type {
  name: "TensorProto"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 label: LABEL_OPTIONAL type: TYPE_INT32 }
  field { name: "float_data" number: 3 label: LABEL_REPEATED type: TYPE_FLOAT }
  field { name: "int32_data" number: 4 label: LABEL_REPEATED type: TYPE_INT32 }
  field { name: "byte_data" number: 5 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "string_data" number: 6 label: LABEL_REPEATED type: TYPE_BYTES }
  field { name: "name" number: 7 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "double_data" number: 9 label: LABEL_REPEATED type: TYPE_DOUBLE }
  field { name: "int64_data" number: 10 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "TensorProtos"
  field { name: "protos" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".wds_pipes.TensorProto" }
}
"""


@cache
def example() -> Any:
    """The class of ``tf.train.Example``."""
    return _message(_EXAMPLE, "Example")


@cache
def tensor_protos() -> Any:
    """The class of Caffe2's ``TensorProtos``."""
    return _message(_TENSORS, "TensorProtos")


def _message(definition: str, name: str) -> Any:
    descriptors, pools, factory, texts = (
        library(f"google.protobuf.{module}", "protobuf", "this format", extra="convert")
        for module in ("descriptor_pb2", "descriptor_pool", "message_factory", "text_format")
    )
    pool = pools.DescriptorPool()
    pool.Add(texts.Parse(definition, descriptors.FileDescriptorProto()))
    return factory.GetMessageClass(pool.FindMessageTypeByName(f"wds_pipes.{name}"))
