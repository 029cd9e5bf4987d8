"""Decode fields to objects and encode objects to fields, by extension, with one table each.

Rules:
1. A library that is not a base dependency is imported when the first field needs it. If it is
   missing, the error says what to install.
2. Nothing is unpickled unless the caller allows it, and nothing larger than its limit is unpacked
   or decoded.
3. A decoder takes bytes and returns an object; an encoder takes an object and returns bytes. The
   caller, who knows the sample, wraps the exceptions that they raise.
4. What a format's library says is valid is valid. The size of an image, an array or a zip is
   checked before memory is taken; for other formats the limits of their libraries hold.

- ``table``: a row for each format, and which encoder and which decoder a field has.
- ``codec``: what a row is, the codecs of users, and what decoders and encoders share.
- ``text``, ``arrays``, ``images``, ``media``: the formats; ``stored``: images as their files store
  them; ``resizing``: images to one size, and parts of them.
"""
