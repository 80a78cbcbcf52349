//! What an answer tells the gateway.

use crate::ids;

/// What an answer has told so far. Each is the last value that was not null.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// `kv_transfer_params`, at the top or in `response`: its JSON text as it came.
    pub handle: Option<Vec<u8>>,
    /// `usage.prompt_tokens`, or `usage.input_tokens` where the API calls it that.
    pub prompt_tokens: Option<u64>,
    /// Prompt tokens that were not computed, since a cache held them: `cached_tokens` of `usage.prompt_tokens_details` or
    /// `usage.input_tokens_details`, or `usage.cache_read_input_tokens`.
    pub cached_tokens: Option<u64>,
    /// `usage.completion_tokens`, or `usage.output_tokens`.
    pub completion_tokens: Option<u64>,
    /// `choices[].finish_reason`, `stop_reason` of Anthropic's API, or why a response of `/v1/responses` is incomplete
    /// (its `status` when it is not).
    pub finish_reason: Option<String>,
    /// `id` of a response of `/v1/responses`, from the whole answer or from the event that ends the stream.
    pub response_id: Option<String>,
    /// `prompt_token_ids`, at the top or in choice 0, if token ids are read.
    pub prompt_token_ids: Ids,
    /// `token_ids` of choice 0, if token ids are read; those of a stream's events one after the other.
    pub token_ids: Ids,
    /// The engine said within a 200 that it failed.
    pub error: bool,
    /// The end mark of the API's stream has come.
    pub done: bool,
}

/// Token ids that an answer carries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ids {
    /// There were none.
    #[default]
    Absent,
    /// These, as little-endian `u32`s.
    Known(Vec<u8>),
    /// Something stood in their place that is no list of `u32`s, or there are more than any context holds. What else
    /// was there is of no use: a sequence with a hole is another sequence.
    Malformed,
}

impl Ids {
    /// The ids, if they are known.
    #[must_use]
    pub fn known(&self) -> Option<&[u8]> {
        match self {
            Self::Known(ids) => Some(ids),
            Self::Absent | Self::Malformed => None,
        }
    }

    /// Reads a JSON list of ids, which is all of the text.
    pub(super) fn read(list: &[u8]) -> Self {
        ids::read_list(list).map_or(Self::Malformed, Self::Known)
    }

    /// Appends what the next event of a stream carries.
    pub(super) fn extend(&mut self, more: Self) {
        match (&mut *self, more) {
            (_, Self::Absent) | (Self::Malformed, _) => {}
            (Self::Known(ids), Self::Known(more)) if ids.len() + more.len() <= ids::MOST => {
                ids.extend_from_slice(&more);
            }
            (Self::Absent, more) => *self = more,
            (Self::Known(_), _) => *self = Self::Malformed,
        }
    }

    /// Takes the place of what came before.
    pub(super) fn replace(&mut self, by: Self) {
        if by != Self::Absent && *self != Self::Malformed {
            *self = by;
        }
    }
}
