//! What of an answer is for the gateway, and what its client must not see.

use std::ops::Range;
use std::sync::LazyLock;

use memchr::memmem::{self, Finder};

use super::json::{Member, skip_space};

/// The member that carries a conversation's handle.
pub(super) const HANDLE: &str = "kv_transfer_params";

/// What is done about the token ids of an answer: `prompt_token_ids` at the top, it and `token_ids` in `choices[]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenIds {
    /// They are not looked for, and go on.
    #[default]
    Ignore,
    /// They are read, and go on.
    Read,
    /// They are read, and the client sees `null` instead, which is what engines write when nobody asks for ids: the
    /// answer is to the byte what it would be without them.
    Take,
}

/// What is read of an answer and what of it is hidden.
#[derive(Clone, Debug)]
pub struct Rules {
    names: Vec<String>,
    finders: Vec<Finder<'static>>,
    token_ids: TokenIds,
}

impl Rules {
    /// Hides nothing.
    #[must_use]
    pub fn observe() -> Self {
        Self::hide(Vec::new())
    }

    /// Hides members of these names, at the top of an object or in its `response`.
    #[must_use]
    pub fn hide(names: Vec<String>) -> Self {
        let finders = names
            .iter()
            .map(|name| Finder::new(&format!("\"{name}\"")).into_owned())
            .collect();
        Self {
            names,
            finders,
            token_ids: TokenIds::Ignore,
        }
    }

    /// The same, with this done about token ids.
    #[must_use]
    pub fn with_token_ids(self, token_ids: TokenIds) -> Self {
        Self { token_ids, ..self }
    }

    /// Whether every byte goes on as it came.
    #[must_use]
    pub fn only_observe(&self) -> bool {
        self.names.is_empty() && !self.takes_token_ids()
    }

    pub(super) fn reads_token_ids(&self) -> bool {
        self.token_ids != TokenIds::Ignore
    }

    pub(super) fn takes_token_ids(&self) -> bool {
        self.token_ids == TokenIds::Take
    }

    pub(super) fn hides(&self, key: &str) -> bool {
        self.names.iter().any(|name| name == key)
    }

    /// Whether the text names a hidden member anywhere, be it in a string or in text that is not JSON.
    pub(super) fn names_hidden(&self, text: &[u8]) -> bool {
        !self.names.is_empty()
            && (has_escape(text)
                || self
                    .names
                    .iter()
                    .any(|name| memmem::find(text, name.as_bytes()).is_some()))
    }

    /// Whether a walk through the members can find anything. Most events of a stream end here, at the speed of memmem.
    pub(super) fn may_tell(&self, text: &[u8]) -> bool {
        // Engines put `"usage":null` into every event.
        let not_null = |value: &[u8]| !is_null(value);
        let telling_type = |value: &[u8]| TELLING_TYPES.iter().any(|name| value.starts_with(name));
        let ids = if self.reads_token_ids() {
            &TOKEN_IDS[..]
        } else {
            &[]
        };
        let mut keys = TELLING.iter().chain(&self.finders).chain(ids);
        keys.any(|key| has_value(text, key, not_null))
            || has_value(text, &TYPE, telling_type)
            || has_escape(text)
    }
}

impl Default for Rules {
    fn default() -> Self {
        Self::hide(vec![HANDLE.to_owned()])
    }
}

/// Keys whose values tell something unless they are null, as they stand in JSON that escapes no letters.
static TELLING: LazyLock<[Finder<'static>; 5]> = LazyLock::new(|| {
    [
        "\"kv_transfer_params\"",
        "\"usage\"",
        "\"finish_reason\"",
        "\"stop_reason\"",
        "\"error\"",
    ]
    .map(Finder::new)
});

static TOKEN_IDS: LazyLock<[Finder<'static>; 2]> =
    LazyLock::new(|| ["\"token_ids\"", "\"prompt_token_ids\""].map(Finder::new));

static TYPE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\"type\""));

/// Values of `type` that tell something.
const TELLING_TYPES: [&[u8]; 5] = [
    b"\"message_stop\"",
    b"\"response.completed\"",
    b"\"response.incomplete\"",
    b"\"response.failed\"",
    b"\"error\"",
];

/// An escape that can spell a letter of a key.
static ESCAPE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new("\\u"));

fn has_escape(text: &[u8]) -> bool {
    ESCAPE.find(text).is_some()
}

/// Whether the quoted key stands before such a value anywhere in the text.
fn has_value(text: &[u8], key: &Finder<'_>, is_wanted: impl Fn(&[u8]) -> bool) -> bool {
    let mut at = 0;
    while let Some(found) = key.find(&text[at..]) {
        at += found + key.needle().len();
        let colon = skip_space(text, at);
        if text.get(colon) == Some(&b':') && is_wanted(&text[skip_space(text, colon + 1)..]) {
            return true;
        }
    }
    false
}

pub(super) fn is_null(value: &[u8]) -> bool {
    value.starts_with(b"null")
}

/// A part of a text that its client does not see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Where it is.
    pub part: Range<usize>,
    /// What stands there instead, possibly nothing.
    pub instead: &'static [u8],
}

impl Cut {
    fn out(part: Range<usize>) -> Self {
        Self { part, instead: b"" }
    }

    pub(super) fn null(part: Range<usize>) -> Self {
        Self {
            part,
            instead: b"null",
        }
    }

    /// The text with its cuts made; they are in order, and apart from each other.
    pub(super) fn make(cuts: &[Self], text: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len());
        let mut at = 0;
        for cut in cuts {
            out.extend_from_slice(&text[at..cut.part.start]);
            out.extend_from_slice(cut.instead);
            at = cut.part.end;
        }
        out.extend_from_slice(&text[at..]);
        out
    }
}

/// Takes members out of one object together with the right comma.
#[derive(Default)]
pub(super) struct Cutter {
    pub(super) cuts: Vec<Cut>,
    /// The end of the member before, if a member that stays came before this one.
    kept_end: Option<usize>,
    /// Members at the front are cut up to the start of the next one, which is not known yet.
    open: bool,
}

impl Cutter {
    pub(super) fn next(&mut self, member: &Member, cut: bool) -> bool {
        if std::mem::take(&mut self.open) {
            if let Some(last) = self.cuts.last_mut() {
                last.part.end = member.key.start;
            }
        }
        match (cut, self.kept_end) {
            (true, Some(end)) => {
                self.cuts.push(Cut::out(end..member.value.end));
                self.kept_end = Some(member.value.end);
            }
            (true, None) => {
                self.cuts.push(Cut::out(member.key.start..member.value.end));
                self.open = true;
            }
            (false, _) => self.kept_end = Some(member.value.end),
        }
        cut
    }
}
