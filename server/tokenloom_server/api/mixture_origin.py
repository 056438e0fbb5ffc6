"""Where the mixture of a run stands, to be read again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenloom_proto.files import resolved

from tokenloom_server.config import mixture_file as config
from tokenloom_server.config.catalog import Catalog
from tokenloom_server.config.run import RunConfig
from tokenloom_server.core.control_characters import escaped, refuse_control_characters
from tokenloom_server.errors import ConfigError

#: Line indexes of text files lie in this folder beside the mixture file.
INDEX_FOLDER = ".tokenloom-index"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOrigin:
    """A mixture file, or a mixture of the command line."""

    where: str
    """Begins each line of an error."""
    index_dir: Path | None
    file: Path | None = None
    mixture: RunConfig | None = None
    folder: Path = Path()
    """Where relative paths of a mixture without a file begin."""

    @classmethod
    def of_file(cls, file: Path, index_dir: Path | None) -> MixtureOrigin:
        return cls(where=escaped(str(file)), index_dir=index_dir, file=file)

    @property
    def base_dir(self) -> Path:
        """Where relative paths of the mixture begin; of a link, where the file is to which it leads now."""
        return self.folder if self.file is None else resolved(self.file).parent

    @property
    def name(self) -> str:
        """What the run is called as long as its file cannot be read."""
        return self.mixture.run if self.mixture is not None else Path(self.where).stem

    def load(self, catalog: Catalog) -> RunConfig:
        """Raises ``ConfigError``."""
        if self.file is not None:
            refuse_control_characters(
                str(self.file), f"{self.where}: the name of this file: ", ConfigError
            )
            return config.load(self.file, catalog)
        assert self.mixture is not None
        return self.mixture
