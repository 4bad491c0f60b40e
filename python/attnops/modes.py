"""What the tokens of a step are, and which keys a layer sees: names of SGLang, and nothing below them."""

from __future__ import annotations

import enum


class ForwardMode(enum.IntEnum):
    """What the tokens of a step are. Names and predicates as in SGLang."""

    EXTEND = 1  # new tokens of each request after a cached prefix, which may be empty; ragged
    DECODE = 2  # one new token per request
    MIXED = 3  # EXTEND in which some requests bring one token: chunked prefill beside decode
    IDLE = 4  # no token: a rank that only takes part in collectives
    TARGET_VERIFY = 5  # speculative decoding, target: `tokens_per_request` draft tokens, causal or a tree
    DRAFT_EXTEND = 6  # speculative decoding, draft: the accepted tokens, ragged or `tokens_per_request` each

    def is_extend(self) -> bool:
        return self in (
            ForwardMode.EXTEND,
            ForwardMode.MIXED,
            ForwardMode.DRAFT_EXTEND,
            ForwardMode.TARGET_VERIFY,
        )

    is_prefill = is_extend

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND

    def is_speculative(self) -> bool:
        return self in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class AttentionType(enum.Enum):
    """Which keys a layer's queries see. Names as in SGLang."""

    DECODER = "decoder"  # causal, through the paged cache
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"  # every key of the request, through the paged cache
    ENCODER_ONLY = "encoder_only"  # every key of the request, straight from k and v: no cache
