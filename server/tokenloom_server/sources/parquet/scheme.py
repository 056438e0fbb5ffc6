"""``parquet:GLOB:COLUMN``: Parquet files."""

from __future__ import annotations

from collections.abc import Mapping

from tokenloom_server.sources.base import Content, Source, TensorFile
from tokenloom_server.sources.scheme import ReadRequest, Scheme
from tokenloom_server.storage.file import File


class ParquetScheme(Scheme):
    """Files of row groups, whose footers say how many rows there are."""

    name = "parquet"
    usage = "parquet:GLOB:COLUMN"
    endings = (".parquet",)
    reads_any_row = True
    stores_row_counts = True

    def open(self, request: ReadRequest) -> Source:
        from tokenloom_server.sources.parquet.reader import ParquetSource

        return ParquetSource(request)

    def columns(self, file: File, path: str) -> Mapping[str, Content | None]:
        import pyarrow.parquet as pq

        from tokenloom_server.sources.columns import contents_of
        from tokenloom_server.storage.arrow_input import for_arrow

        return contents_of(pq.read_schema(for_arrow(file)))

    def open_tensors(self, file: File) -> TensorFile:
        from tokenloom_server.sources.parquet.reader import ParquetTensors

        return ParquetTensors(file)
