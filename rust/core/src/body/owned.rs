//! The members that the gateway owns: every top-level member it reads or edits anywhere.

/// Names of the owned members, sorted.
///
/// A duplicate of one of these is refused, because the gateway and the engine could read different values of it. All
/// other members are the engine's business and pass through, duplicates included. A member that the gateway starts to
/// read or to edit belongs in this list.
pub const OWNED: &[&str] = &[
    "bad_words",
    "best_of",
    "cache_salt",
    "conversation_id",
    "echo",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "input",
    "kv_transfer_params",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "messages",
    "min_tokens",
    "model",
    "n",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "prompt_logprobs",
    "response_format",
    "return_token_ids",
    "session_params",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "text",
    "tool_choice",
    "top_logprobs",
    "use_beam_search",
];

/// Position of `name` in [`OWNED`].
pub(super) fn position(name: &[u8]) -> Option<usize> {
    OWNED
        .binary_search_by(|owned| owned.as_bytes().cmp(name))
        .ok()
}

/// Which owned members have been seen in a body.
#[derive(Debug, Default)]
pub(super) struct Seen(u64);

const _: () = assert!(
    OWNED.len() <= u64::BITS as usize,
    "Seen holds one bit for each owned member"
);

impl Seen {
    /// Notes one member; `false` when it was seen before.
    pub(super) fn insert(&mut self, position: usize) -> bool {
        let bit = 1 << position;
        let fresh = self.0 & bit == 0;
        self.0 |= bit;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_every_name_is_found() {
        assert!(OWNED.is_sorted());
        for (index, name) in OWNED.iter().enumerate() {
            assert_eq!(position(name.as_bytes()), Some(index));
        }
        assert_eq!(position(b"temperature"), None);
    }

    #[test]
    fn a_member_is_fresh_once() {
        let mut seen = Seen::default();
        let last = OWNED.len() - 1;
        assert!(seen.insert(0) && seen.insert(last));
        assert!(!seen.insert(0) && !seen.insert(last));
    }
}
