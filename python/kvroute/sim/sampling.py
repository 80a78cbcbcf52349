"""What a sequence's next token is, and whether it is the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.sim import tokens as vocabulary

if TYPE_CHECKING:
    from kvroute.sim.config import EngineSpec
    from kvroute.sim.sequence import Finish, Sequence


def sample(sequence: Sequence, spec: EngineSpec) -> int:
    """The token that follows what the sequence's blocks hold."""
    sampling, written = sequence.sampling, sequence.written
    thought = vocabulary.thought(written) if spec.thinks else None
    if thought is not None:
        return thought
    return sequence.cursor.next_token(
        written,
        salt=sampling.salt,
        end_every=spec.end_every,
        may_end=not sampling.ignore_eos and written >= sampling.min_tokens,
    )


def finish_of(sequence: Sequence, token: int, spec: EngineSpec) -> Finish | None:
    """Why a sequence ends with its last token, None when it goes on."""
    sampling, written = sequence.sampling, sequence.written
    ends = (token == vocabulary.EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
    if ends and written >= sampling.min_tokens:
        return "stop"
    if written >= sampling.max_tokens or len(sequence.tokens) >= spec.context_length:
        return "length"
    return None
