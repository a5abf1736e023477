"""Why there is no more reuse, in plain words: one entry for each `Reason` of the contract."""

from dataclasses import dataclass

PREFIX = "REASON_"


@dataclass(frozen=True)
class Words:
    """What happened, and what a person can do about it ("" where nothing needs doing)."""

    sentence: str
    advice: str = ""


WORDS = {
    "UNSPECIFIED": Words("The answer gives no reason.", "Compare the versions of agent and store."),
    "UNKNOWN_TEXT": Words(
        "This text has not been seen before, or its tokens differ from the stored ones.",
        "If it should be known: was it tokenised alone when stored, but inside a prompt now? "
        "Build prompts from the documents' own token ids (kvblend.prompt).",
    ),
    "NOTHING_STORED": Words(
        "Nothing is stored yet for this model, adapter, tenant and salt.",
        "Precompute documents, or check that engine and question use the same model and tenant.",
    ),
    "TOO_SHORT": Words(
        "These stretches are too short to be found on their own.",
        "Short known texts are found from 16 tokens on, if they were stored as documents.",
    ),
    "OPAQUE_SPAN": Words(
        "An image, audio or embedding lies in this stretch, so its text alone does not identify it.",
        "Only an exact prefix with the same media can be reused.",
    ),
    "LAST_TOKEN": Words("The last token is always computed: its output is the answer's first token."),
    "CONTEXT_CLASS_NOT_ALLOWED": Words(
        "The text is stored, but only from inside another prompt, and this space does not allow such sources.",
        "Store it as a document of its own, alone or behind the shared prefix.",
    ),
    "PREFIX_ONLY_SPACE": Words(
        "This model's position encoding cannot be moved, so only exact prefixes are reused.",
        "Nothing to set: learned positions, ALiBi and length-dependent RoPE allow no segments.",
    ),
    "BLENDING_OFF": Words(
        "The request or the operator has switched blending off: only exact prefixes were looked up.",
        "Switch blending on for this request, or at the agent.",
    ),
    "QUOTA": Words("The tenant's quota is used up.", "Raise the quota or clear what is no longer needed."),
    "SLOWER_THAN_COMPUTE": Words(
        "Fetching this from the second tier would take longer than computing it.",
        "Nothing to do; a larger L1 or a faster link changes the balance.",
    ),
    "ROPE_NOT_REGISTERED": Words(
        "The engine has not proven its rotary embedding, so K cannot be moved to new positions.",
        "Register it (client.register_rope) after registering the KV cache.",
    ),
    "DEADLINE": Words(
        "The text is stored, but did not arrive in L1 before the lookup's deadline.",
        "It stays for the next request; a longer deadline would have waited for it.",
    ),
    "INCOMPLETE_RANKS": Words(
        "Not every rank or layer group of these chunks is stored.",
        "They become usable as soon as every rank has stored them; check each rank's agent.",
    ),
    "EVICTED": Words(
        "The text was stored once, but has been evicted since.", "A larger L1, or pinning, keeps it longer."
    ),
    "LEASE_REVOKED": Words(
        "The store took these chunks back under memory pressure before they were copied.",
        "Retrieve sooner after the lookup, or give the store more memory.",
    ),
    "STALE_EPOCH": Words(
        "The store has restarted, or the weights have changed, since this was looked up.", "Look the prompt up again."
    ),
    "STALE_GENERATION": Words(
        "The memory was given to something else while it was being read; the copy was thrown away.",
        "Nothing to do: the engine computes these tokens itself.",
    ),
    "CHECKSUM_MISMATCH": Words(
        "The stored bytes were damaged: they were dropped, not used.",
        "Once is bad luck; if it happens again, check the memory and the second tier.",
    ),
    "COPY_FAILED": Words("Copying the KV to the engine failed.", "The agent's log names the error."),
    "OUT_OF_BOUNDS": Words(
        "The range lies outside the memory that the engine registered for this request.",
        "Check the block table and the offset that the engine passes.",
    ),
    "SUPERSEDED": Words("A newer attempt of the same request, or one with other tokens, has replaced this one."),
    "NOT_IN_ANSWER": Words(
        "The range that was asked for is not part of the lookup's answer.", "Retrieve only what lookup returned."
    ),
    "MATCHER_UNAVAILABLE": Words(
        "No matcher answered, so only the exact prefix was looked up.", "Start it or check its address: kvblend ping."
    ),
    "STORE_UNAVAILABLE": Words(
        "The store did not answer: everything is computed.", "Start it or check its address: kvblend ping."
    ),
    "AGENT_UNAVAILABLE": Words(
        "The agent did not answer: everything is computed.", "Start it or check its address: kvblend ping."
    ),
    "L2_UNAVAILABLE": Words(
        "Redis did not answer, so only what lies in L1 was used.", "Start it or check its address: kvblend ping."
    ),
    "SESSION_LOST": Words(
        "The connection that held this request's leases broke.", "The next request opens a new one by itself."
    ),
    "NO_SPACE": Words(
        "The store had no room: everything in it was in use.", "Give the store more memory, or end requests sooner."
    ),
    "NO_STORE": Words("The request asked that nothing of it is kept."),
    "ADMISSION": Words(
        "This is mostly a copy of what is stored already, so it was not stored again yet.",
        "It is stored when the same prompt comes a second time.",
    ),
    "BLENDED_NOT_ALLOWED": Words(
        "This KV depends on reused segments, and the space does not allow storing such KV.",
        "Allow blended objects if the next turn should continue from here.",
    ),
    "RESERVATION_EXPIRED": Words(
        "The copy into the store took longer than its reservation lasts; nothing of it became visible."
    ),
    "BEING_WRITTEN": Words("Another request is storing the same text right now.", "The next request finds it."),
    "CLEARED": Words("The text was cleared on request."),
}


def bare_name(reason: str) -> str:
    """A reason without the contract's prefix: UNKNOWN_TEXT for REASON_UNKNOWN_TEXT."""
    return reason.removeprefix(PREFIX)


def words_of(reason: str) -> Words:
    """Plain words for a reason, with or without its prefix; a newer release's reason is named as it is."""
    name = bare_name(reason)
    return WORDS.get(name) or Words(f"{name}: a reason that this version has no words for.", "Update kvblend's tools.")
