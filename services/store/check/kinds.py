"""Kinds of disagreement: their stable names, and what people read."""

HEADER_DAMAGED = "HEADER_DAMAGED"
OBJECT_LOST = "OBJECT_LOST"
BLOCK_LEAKED = "BLOCK_LEAKED"
FREE_LIST = "FREE_LIST"
FREE_RUNS = "FREE_RUNS"
META_DAMAGED = "META_DAMAGED"
META_DISAGREES = "META_DISAGREES"
PAYLOAD_DAMAGED = "PAYLOAD_DAMAGED"
LOG_OUT_OF_STEP = "LOG_OUT_OF_STEP"
LOG_LACKS = "LOG_LACKS"
L2_MISSING = "L2_MISSING"
L2_TORN = "L2_TORN"
L2_UNKNOWN = "L2_UNKNOWN"

# For people: what there are so many of, and what a fix does.
TEXTS = {
    HEADER_DAMAGED: ("headers whose state or place cannot be right", "their chunks are dropped"),
    OBJECT_LOST: ("objects of the catalog whose header says that they are not there", "their chunks are dropped"),
    BLOCK_LEAKED: ("blocks that belong to nobody", "they are freed, or quarantined while somebody may write to them"),
    FREE_LIST: ("headers that the list of free ones lacks or has wrongly", "the list is made anew"),
    FREE_RUNS: ("blocks that do not fit between their neighbours", "restart the store: it counts anew"),
    META_DAMAGED: ("objects whose description is damaged", "their chunks are dropped"),
    META_DISAGREES: ("objects whose description is not what the catalog says", "their chunks are dropped"),
    PAYLOAD_DAMAGED: ("objects whose KV bytes differ from their checksum", "their chunks are dropped"),
    LOG_OUT_OF_STEP: ("streams to the matchers' log out of step", "the log is told everything again"),
    LOG_LACKS: (
        "chunks that are held and that matchers do not find",
        "the log is told everything again; a matcher that is short of memory drops entries by itself",
    ),
    L2_MISSING: ("chunks marked as being in L2 that L2 does not have", "the mark and the matchers' claim are removed"),
    L2_UNKNOWN: ("chunks that L2 has and that matchers do not find", "matchers are told of them"),
    L2_TORN: ("objects in L2 with missing parts", "they are deleted there"),
}
