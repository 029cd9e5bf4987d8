"""Decode fields to objects and encode objects to fields, by extension, with one table each.

Rules:
1. A library that is not a base dependency is imported when the first field needs it. If it is
   missing, the error says what to install.
2. Nothing is unpickled unless the caller allows it, and nothing larger than its limit is unpacked
   or decoded.
3. A decoder takes bytes and returns an object; an encoder takes an object and returns bytes. The
   caller, who knows the sample, wraps the exceptions that they raise.
4. A field may be hostile. The time and memory of a decoder grow about linearly with its bytes, and
   deep nesting is an exception, never a crash. If a library does not promise this, bound the work
   before it is done, and test it with a hostile field.

- ``table``: a row for each format. ``codec``: what a row is, and the codecs of users.
- ``decoding``, ``encoding``: which decoder or encoder a field has. ``names``: what both share.
- ``pickles``: what a ``pt`` would call.
- ``text``, ``arrays``, ``images``, ``audio``, ``video``: the formats; ``jpeg``,
  ``jpeg_header`` and ``tiff``: what is special to these images; ``mp3``: how long one is;
  ``resizing``: images to one size.
- ``records``: files of many records; ``parquet`` and ``pages``: the rows and pages of one.
"""
