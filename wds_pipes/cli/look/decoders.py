"""The decoders of fields, each made when it is first needed."""

from __future__ import annotations

from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.names import Decoder


class Decoders(dict[str, Decoder | None]):
    """The decoders by field; None: the field stays bytes."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__()
        self._decoding = decoding

    def __missing__(self, field: str) -> Decoder | None:
        if len(self) > 4096:  # so that hostile names do not fill the memory
            self.clear()
        self[field] = decoder = self._decoding.decoder(field)
        return decoder
