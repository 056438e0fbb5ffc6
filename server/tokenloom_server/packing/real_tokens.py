"""How many tokens of a micro-step are documents', and how many count as labels: what losses are divided by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom_server.packing.samples import Flags, Int64s, Sample, SampleFormat


class Boundaries(NamedTuple):
    """Where documents begin: id ``position[i]`` of sample ``sample[i]``, the samples counted from the first of those
    looked at."""

    sample: Int64s
    position: Int64s


class RealTokens:
    """Counts of samples, by what travels with them.

    A *token* is a position of ``input_ids`` that holds a document's id. A *label* is an id that a causal model is to
    predict there, and that counts: not padding, not the sample's first id (nothing stands before it), not one that a
    loss mask leaves out, and with ``mask_boundaries`` no document's first.
    """

    def __init__(
        self, form: SampleFormat, *, mask_boundaries: bool = False, of_rows: bool = False
    ) -> None:
        """``of_rows``: samples are rows in batches, of which each is a token and none has labels."""
        self._form = form
        self.mask_boundaries = mask_boundaries and not of_rows
        #: Whether samples have to be looked at.
        self.varies = not of_rows and (form.trailer_bytes > 0 or mask_boundaries)
        #: Tokens and labels of a sample, where they do not.
        self.full = (1, 0) if of_rows else (form.length, form.width - 1)

    def of(
        self, samples: list[Sample], steps: int, padding: Flags, boundaries: Boundaries | None
    ) -> tuple[Int64s, list[int]]:
        """The tokens of each sample, and the labels of each of ``steps`` micro-steps of equally many samples, one after
        the other, as they travel. ``padding``: which samples only fill up a last micro-step. ``boundaries``: with
        ``mask_boundaries``."""
        form = self._form
        trailers = np.empty((len(samples), 0), np.uint8)
        if form.trailer_bytes:
            joined = b"".join([sample[form.id_bytes :] for sample in samples])
            trailers = np.frombuffer(joined, np.uint8).reshape(len(samples), form.trailer_bytes)
        if form.lengths:
            filled: Int64s = trailers[:, :4].copy().view("<u4")[:, 0].astype(np.int64)
        else:
            filled = np.where(padding, 0, form.width)
        begins = form.width - filled if form.padding == "left" else np.zeros_like(filled)
        bits = trailers[:, 4 * form.lengths :] if form.masked else None
        if bits is None:
            labels = np.maximum(filled - 1, 0).reshape(steps, -1).sum(1)
        else:
            by_step = bits.reshape(steps, -1)
            marked = [int.from_bytes(own.tobytes(), "little").bit_count() for own in by_step]
            first = np.where(
                filled > 0,
                _bit(bits, np.arange(len(samples)), np.minimum(begins, form.width - 1)),
                0,
            )
            labels = np.array(marked) - first.reshape(steps, -1).sum(1)
        if boundaries is not None:
            sample, position = boundaries
            counted = (position > begins[sample]) & (position < (begins + filled)[sample])
            sample, position = sample[counted], position[counted]
            taken = np.ones_like(sample) if bits is None else _bit(bits, sample, position)
            labels = labels - np.bincount(sample * steps // len(samples), taken, steps).astype(
                np.int64
            )
        return form.real_tokens(filled), labels.tolist()


def _bit(bits: npt.NDArray[np.uint8], sample: Int64s, position: Int64s) -> Int64s:
    """One bit each of some samples' masks."""
    bit: Int64s = (bits[sample, position >> 3] >> (position & 7)).astype(np.int64) & 1
    return bit
