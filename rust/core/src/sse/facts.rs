//! The facts in one JSON object of an answer, and which of its members are hidden.

use std::ops::Range;
use std::sync::LazyLock;

use memchr::memmem::{self, Finder};

use super::json::{Elements, Malformed, Member, Members, skip_space, unescape};

/// What an answer has told so far. Each is the last value that was not null.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// `kv_transfer_params`, at the top or in `response`: its JSON text as it came.
    pub handle: Option<Vec<u8>>,
    /// `usage.prompt_tokens`, or `usage.input_tokens` where the API calls it that.
    pub prompt_tokens: Option<u64>,
    /// `usage.completion_tokens`, or `usage.output_tokens`.
    pub completion_tokens: Option<u64>,
    /// `choices[].finish_reason`, `stop_reason` of Anthropic's API, or why a response of `/v1/responses` is incomplete
    /// (its `status` when it is not).
    pub finish_reason: Option<String>,
    /// The engine said within a 200 that it failed.
    pub error: bool,
    /// The end mark of the API's stream has come.
    pub done: bool,
}

/// The members that clients must not see, at the top of an object or in its `response`.
#[derive(Clone, Debug)]
pub struct Hidden {
    names: Vec<String>,
    finders: Vec<Finder<'static>>,
}

/// The member that carries a conversation's handle.
const HANDLE: &str = "kv_transfer_params";

impl Hidden {
    /// Hides members of these names.
    #[must_use]
    pub fn new(names: Vec<String>) -> Self {
        let finders = names
            .iter()
            .map(|name| Finder::new(&format!("\"{name}\"")).into_owned())
            .collect();
        Self { names, finders }
    }

    /// Hides nothing.
    #[must_use]
    pub fn nothing() -> Self {
        Self::new(Vec::new())
    }

    /// Whether nothing is hidden.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Whether the text names a hidden member anywhere, be it in a string or in text that is not JSON.
    pub(super) fn is_named_in(&self, text: &[u8]) -> bool {
        ESCAPE.find(text).is_some() && !self.is_empty()
            || self
                .names
                .iter()
                .any(|name| memmem::find(text, name.as_bytes()).is_some())
    }
}

impl Default for Hidden {
    fn default() -> Self {
        Self::new(vec![HANDLE.to_owned()])
    }
}

/// What becomes of an object on its way to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on as it came.
    Keep,
    /// Some members are hidden.
    Cut {
        /// The parts to leave out; in order, and apart from each other.
        cuts: Vec<Range<usize>>,
        /// Whether the rest tells the client nothing: no other member, or neither a choice nor usage nor an error. An
        /// event like that was sent for the gateway alone.
        rest_is_empty: bool,
    },
    /// It is not JSON from start to end, and names a hidden member: it must not go on, for a part of a handle is as
    /// telling as the whole.
    Unreadable,
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

/// Reads one JSON object of an answer: adds what it tells to `facts`, and says what of it the client may see.
///
/// Text that is not a JSON object is kept. An object that breaks off or is malformed tells nothing.
pub fn inspect(text: &[u8], hidden: &Hidden, facts: &mut Facts) -> Verdict {
    let start = skip_space(text, 0);
    if text.get(start) != Some(&b'{') || !may_tell(text, hidden) {
        return Verdict::Keep;
    }
    let mut object = Object::default();
    match object.read(text, start, hidden) {
        Ok(()) => object.conclude(facts),
        Err(Malformed) if hidden.is_named_in(text) => Verdict::Unreadable,
        Err(Malformed) => Verdict::Keep,
    }
}

/// Whether a walk through the members can find anything. Most events of a stream end here, at the speed of memmem.
fn may_tell(text: &[u8], hidden: &Hidden) -> bool {
    // Engines put `"usage":null` into every event.
    let not_null = |value: &[u8]| !is_null(value);
    let telling_type = |value: &[u8]| TELLING_TYPES.iter().any(|name| value.starts_with(name));
    let mut keys = TELLING.iter().chain(&hidden.finders);
    keys.any(|key| has_value(text, key, not_null))
        || has_value(text, &TYPE, telling_type)
        || ESCAPE.find(text).is_some()
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

fn is_null(value: &[u8]) -> bool {
    value.starts_with(b"null")
}

/// What was found in one object before it is known to be whole. `kind` and `named` are its `type` and `object`.
#[derive(Default)]
struct Object {
    found: Facts,
    cuts: Vec<Range<usize>>,
    empty_choices: bool,
    has_usage: bool,
    kept: usize,
    kind: Option<String>,
    named: Option<String>,
    status: Option<String>,
    incomplete: Option<String>,
}

impl Object {
    fn read(&mut self, text: &[u8], start: usize, hidden: &Hidden) -> Result<(), Malformed> {
        let mut cutter = Cutter::default();
        let mut members = Members::new(text, start);
        for member in &mut members {
            let member = member?;
            let value = &text[member.value.clone()];
            let key = Key::of(&text[member.key.clone()]);
            if cutter.next(&member, self.hides(&key, value, hidden)) {
                continue;
            }
            self.kept += 1;
            match (key.as_str(), value.first()) {
                ("usage", Some(b'{')) => self.usage(value)?,
                ("choices", Some(b'[')) => self.choices(value)?,
                ("error", _) => self.found.error |= !is_null(value),
                ("response", Some(b'{')) => self.response(text, member.value.start, hidden)?,
                ("message", Some(b'{')) => {
                    if let Some(usage) = object_member(value, "usage")? {
                        self.usage(usage)?;
                    }
                }
                ("delta", Some(b'{')) => {
                    if let Some(reason) = string_member(value, "stop_reason")? {
                        self.found.finish_reason = Some(reason);
                    }
                }
                ("stop_reason", Some(b'"')) => self.found.finish_reason = unescape(value),
                ("type", Some(b'"')) => self.kind = unescape(value),
                _ => self.response_member(key.as_str(), value)?,
            }
        }
        if skip_space(text, members.end()) != text.len() {
            return Err(Malformed);
        }
        self.cuts.append(&mut cutter.cuts);
        self.cuts.sort_by_key(|cut| cut.start);
        Ok(())
    }

    /// Notes a handle; gives whether the client must not see this member. One that is null tells nothing: it stays, so
    /// that an engine's every event is not rewritten for it.
    fn hides(&mut self, key: &Key<'_>, value: &[u8], hidden: &Hidden) -> bool {
        if is_null(value) {
            return false;
        }
        if key.as_str() == HANDLE {
            self.found.handle = Some(value.to_vec());
        }
        hidden.names.iter().any(|name| name == key.as_str())
    }

    /// The `response` of an event of `/v1/responses`.
    fn response(&mut self, text: &[u8], start: usize, hidden: &Hidden) -> Result<(), Malformed> {
        let mut cutter = Cutter::default();
        for member in Members::new(text, start) {
            let member = member?;
            let value = &text[member.value.clone()];
            let key = Key::of(&text[member.key.clone()]);
            if cutter.next(&member, self.hides(&key, value, hidden)) {
                continue;
            }
            match (key.as_str(), value.first()) {
                ("usage", Some(b'{')) => self.usage(value)?,
                ("error", _) => self.found.error |= !is_null(value),
                _ => self.response_member(key.as_str(), value)?,
            }
        }
        self.cuts.append(&mut cutter.cuts);
        Ok(())
    }

    /// Members that a response of `/v1/responses` has, in an event as well as when it is the whole answer.
    fn response_member(&mut self, key: &str, value: &[u8]) -> Result<(), Malformed> {
        match (key, value.first()) {
            ("object", Some(b'"')) => self.named = unescape(value),
            ("status", Some(b'"')) => self.status = unescape(value),
            ("incomplete_details", Some(b'{')) => self.incomplete = string_member(value, "reason")?,
            _ => {}
        }
        Ok(())
    }

    fn usage(&mut self, usage: &[u8]) -> Result<(), Malformed> {
        self.has_usage = true;
        for member in Members::new(usage, 0) {
            let member = member?;
            let number = || {
                std::str::from_utf8(&usage[member.value.clone()])
                    .ok()
                    .and_then(|text| text.parse().ok())
            };
            match Key::of(&usage[member.key.clone()]).as_str() {
                "prompt_tokens" | "input_tokens" => {
                    self.found.prompt_tokens = number().or(self.found.prompt_tokens);
                }
                "completion_tokens" | "output_tokens" => {
                    self.found.completion_tokens = number().or(self.found.completion_tokens);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn choices(&mut self, choices: &[u8]) -> Result<(), Malformed> {
        self.empty_choices = true;
        for choice in Elements::new(choices, 0) {
            let choice = &choices[choice?];
            self.empty_choices = false;
            if choice.first() == Some(&b'{') {
                if let Some(reason) = string_member(choice, "finish_reason")? {
                    // vLLM ends a stream so when the request failed inside the engine, with status 200.
                    self.found.error |= reason == "error";
                    self.found.finish_reason = Some(reason);
                }
            }
        }
        Ok(())
    }

    fn conclude(self, facts: &mut Facts) -> Verdict {
        let Self {
            found,
            cuts,
            empty_choices,
            has_usage,
            kept,
            kind,
            named,
            status,
            incomplete,
        } = self;
        let ends_response = matches!(
            kind.as_deref(),
            Some("response.completed" | "response.incomplete" | "response.failed")
        );
        let reason = if ends_response || named.as_deref() == Some("response") && kind.is_none() {
            incomplete.or(status)
        } else {
            None
        };
        let rest_is_empty = kept == 0 || empty_choices && !has_usage && !found.error;
        facts.handle = found.handle.or(facts.handle.take());
        facts.prompt_tokens = found.prompt_tokens.or(facts.prompt_tokens);
        facts.completion_tokens = found.completion_tokens.or(facts.completion_tokens);
        facts.finish_reason = reason
            .or(found.finish_reason)
            .or(facts.finish_reason.take());
        facts.error |= found.error || matches!(kind.as_deref(), Some("error" | "response.failed"));
        facts.done |= ends_response || kind.as_deref() == Some("message_stop");
        if cuts.is_empty() {
            Verdict::Keep
        } else {
            Verdict::Cut {
                cuts,
                rest_is_empty,
            }
        }
    }
}

/// Takes members out of one object together with the right comma.
#[derive(Default)]
struct Cutter {
    cuts: Vec<Range<usize>>,
    /// The end of the member before, if a member that stays came before this one.
    kept_end: Option<usize>,
    /// Members at the front are cut up to the start of the next one, which is not known yet.
    open: bool,
}

impl Cutter {
    fn next(&mut self, member: &Member, cut: bool) -> bool {
        if std::mem::take(&mut self.open) {
            if let Some(last) = self.cuts.last_mut() {
                last.end = member.key.start;
            }
        }
        match (cut, self.kept_end) {
            (true, Some(end)) => {
                self.cuts.push(end..member.value.end);
                self.kept_end = Some(member.value.end);
            }
            (true, None) => {
                self.cuts.push(member.key.start..member.value.end);
                self.open = true;
            }
            (false, _) => self.kept_end = Some(member.value.end),
        }
        cut
    }
}

/// A key, whose escapes are resolved only if it has any.
enum Key<'a> {
    Plain(&'a str),
    Escaped(String),
}

impl<'a> Key<'a> {
    fn of(quoted: &'a [u8]) -> Self {
        let inner = &quoted[1..quoted.len() - 1];
        match std::str::from_utf8(inner) {
            Ok(text) if !inner.contains(&b'\\') => Self::Plain(text),
            _ => Self::Escaped(unescape(quoted).unwrap_or_default()),
        }
    }

    fn as_str(&self) -> &str {
        match self {
            Self::Plain(text) => text,
            Self::Escaped(text) => text,
        }
    }
}

/// The last member called `name` of an object.
fn last_member<'a>(object: &'a [u8], name: &str) -> Result<Option<&'a [u8]>, Malformed> {
    let mut found = None;
    for member in Members::new(object, 0) {
        let member = member?;
        if Key::of(&object[member.key]).as_str() == name {
            found = Some(&object[member.value]);
        }
    }
    Ok(found)
}

fn object_member<'a>(object: &'a [u8], name: &str) -> Result<Option<&'a [u8]>, Malformed> {
    Ok(last_member(object, name)?.filter(|value| value.first() == Some(&b'{')))
}

fn string_member(object: &[u8], name: &str) -> Result<Option<String>, Malformed> {
    Ok(last_member(object, name)?.and_then(unescape))
}
