"""What another data loader's checkpoint, which has no seal, is recognised by, and what it says of the token clock."""

from __future__ import annotations

#: One of them at least.
OLDER_KEYS = ("resume_state", "sample_index")
#: The total tokens; and the tokens of a sample, under the names that tools have for them.
CLOCK_KEYS = ("total_tokens", "context_length", "sequence_length", "block_size", "max_seq_len")
