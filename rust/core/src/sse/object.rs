//! Reading one JSON object of an answer.

use super::json::{Elements, Malformed, Members, skip_space, unescape};
use super::rules::{Cutter, HANDLE, is_null};
use super::{Cut, Facts, Ids, Rules};

/// What becomes of an object on its way to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on as it came.
    Keep,
    /// Parts of it are for the gateway alone.
    Edit {
        /// These parts; in order, and apart from each other.
        cuts: Vec<Cut>,
        /// Whether the rest tells the client nothing: no other member, or neither a choice nor usage nor an error. An
        /// event like that was sent for the gateway alone.
        rest_is_empty: bool,
    },
    /// It is not JSON from start to end, and names a hidden member: it must not go on, for a part of a handle is as
    /// telling as the whole.
    Unreadable,
}

/// Reads one JSON object of an answer: adds what it tells to `facts`, and says what of it the client may see.
///
/// Text that is not a JSON object is kept. An object that breaks off or is malformed tells nothing.
pub fn inspect(text: &[u8], rules: &Rules, facts: &mut Facts) -> Verdict {
    let start = skip_space(text, 0);
    if text.get(start) != Some(&b'{') {
        return Verdict::Keep;
    }
    let mut object = Object::default();
    match object.read(text, start, rules) {
        Ok(()) => object.conclude(facts),
        Err(Malformed) if rules.names_hidden(text) => Verdict::Unreadable,
        Err(Malformed) => Verdict::Keep,
    }
}

/// What was found in one object before it is known to be whole. `kind` is its `type`; `own` is what it says of itself
/// if it is a response of `/v1/responses`, and `response` what the one in it says.
#[derive(Default)]
struct Object {
    found: Facts,
    cuts: Vec<Cut>,
    cuts_member: bool,
    empty_choices: bool,
    has_usage: bool,
    kept: usize,
    kind: Option<String>,
    own: Response,
    response: Response,
}

/// Members of a response of `/v1/responses`. `named` is its `object`.
#[derive(Default)]
struct Response {
    id: Option<String>,
    named: Option<String>,
    status: Option<String>,
    incomplete: Option<String>,
}

impl Response {
    fn member(&mut self, key: &str, value: &[u8]) -> Result<(), Malformed> {
        match (key, value.first()) {
            ("id", Some(b'"')) => self.id = unescape(value),
            ("object", Some(b'"')) => self.named = unescape(value),
            ("status", Some(b'"')) => self.status = unescape(value),
            ("incomplete_details", Some(b'{')) => self.incomplete = string_member(value, "reason")?,
            _ => {}
        }
        Ok(())
    }
}

impl Object {
    fn read(&mut self, text: &[u8], start: usize, rules: &Rules) -> Result<(), Malformed> {
        let mut cutter = Cutter::default();
        let mut members = Members::new(text, start);
        for member in &mut members {
            let member = member?;
            let value = &text[member.value.clone()];
            let key = Key::of(&text[member.key.clone()]);
            if cutter.next(&member, self.hides(&key, value, rules)) {
                continue;
            }
            self.kept += 1;
            match (key.as_str(), value.first()) {
                ("usage", Some(b'{')) => self.usage(value)?,
                ("choices", Some(b'[')) => self.choices(text, member.value.start, rules)?,
                ("prompt_token_ids", _) if rules.reads_token_ids() && !is_null(value) => {
                    self.found.prompt_token_ids.replace(Ids::read(value));
                    if rules.takes_token_ids() {
                        self.cuts.push(Cut::null(member.value));
                    }
                }
                ("error", _) => self.found.error |= !is_null(value),
                ("response", Some(b'{')) => self.response(text, member.value.start, rules)?,
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
                _ => self.own.member(key.as_str(), value)?,
            }
        }
        if skip_space(text, members.end()) != text.len() {
            return Err(Malformed);
        }
        self.take(cutter);
        self.cuts.sort_by_key(|cut| cut.part.start);
        Ok(())
    }

    fn take(&mut self, mut cutter: Cutter) {
        self.cuts_member |= !cutter.cuts.is_empty();
        self.cuts.append(&mut cutter.cuts);
    }

    /// Notes a handle; gives whether the client must not see this member. One that is null tells nothing: it stays, so
    /// that an engine's every event is not rewritten for it.
    fn hides(&mut self, key: &Key<'_>, value: &[u8], rules: &Rules) -> bool {
        if is_null(value) {
            return false;
        }
        if key.as_str() == HANDLE {
            self.found.handle = Some(value.to_vec());
        }
        rules.hides(key.as_str())
    }

    /// The `response` of an event of `/v1/responses`.
    fn response(&mut self, text: &[u8], start: usize, rules: &Rules) -> Result<(), Malformed> {
        let mut cutter = Cutter::default();
        for member in Members::new(text, start) {
            let member = member?;
            let value = &text[member.value.clone()];
            let key = Key::of(&text[member.key.clone()]);
            if cutter.next(&member, self.hides(&key, value, rules)) {
                continue;
            }
            match (key.as_str(), value.first()) {
                ("usage", Some(b'{')) => self.usage(value)?,
                ("error", _) => self.found.error |= !is_null(value),
                _ => self.response.member(key.as_str(), value)?,
            }
        }
        self.take(cutter);
        Ok(())
    }

    fn usage(&mut self, usage: &[u8]) -> Result<(), Malformed> {
        self.has_usage = true;
        for member in Members::new(usage, 0) {
            let member = member?;
            let value = &usage[member.value];
            match Key::of(&usage[member.key]).as_str() {
                "prompt_tokens" | "input_tokens" => {
                    self.found.prompt_tokens = number(value).or(self.found.prompt_tokens);
                }
                "completion_tokens" | "output_tokens" => {
                    self.found.completion_tokens = number(value).or(self.found.completion_tokens);
                }
                "cache_read_input_tokens" => {
                    self.found.cached_tokens = number(value).or(self.found.cached_tokens);
                }
                "prompt_tokens_details" | "input_tokens_details" if value.starts_with(b"{") => {
                    let cached = last_member(value, "cached_tokens")?.and_then(number);
                    self.found.cached_tokens = cached.or(self.found.cached_tokens);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn choices(&mut self, text: &[u8], start: usize, rules: &Rules) -> Result<(), Malformed> {
        self.empty_choices = true;
        for choice in Elements::new(text, start) {
            let choice = choice?;
            self.empty_choices = false;
            if text[choice.start] == b'{' {
                self.choice(text, choice.start, rules)?;
            }
        }
        Ok(())
    }

    fn choice(&mut self, text: &[u8], start: usize, rules: &Rules) -> Result<(), Malformed> {
        let mut index = &b"0"[..];
        let mut reason = None;
        let (mut prompt, mut output) = (Ids::Absent, Ids::Absent);
        for member in Members::new(text, start) {
            let member = member?;
            let value = &text[member.value.clone()];
            let key = Key::of(&text[member.key]);
            match key.as_str() {
                "index" => index = value,
                "finish_reason" => reason = unescape(value),
                name @ ("token_ids" | "prompt_token_ids")
                    if rules.reads_token_ids() && !is_null(value) =>
                {
                    let place = if name == "token_ids" {
                        &mut output
                    } else {
                        &mut prompt
                    };
                    place.replace(Ids::read(value));
                    if rules.takes_token_ids() {
                        self.cuts.push(Cut::null(member.value));
                    }
                }
                _ => {}
            }
        }
        // Others have tokens of their own.
        if index == b"0" {
            self.found.prompt_token_ids.replace(prompt);
            self.found.token_ids.extend(output);
        }
        if let Some(reason) = reason {
            // vLLM ends a stream so when the request failed inside the engine, with status 200.
            self.found.error |= reason == "error";
            self.found.finish_reason = Some(reason);
        }
        Ok(())
    }

    fn conclude(self, facts: &mut Facts) -> Verdict {
        let Self {
            found,
            cuts,
            cuts_member,
            empty_choices,
            has_usage,
            kept,
            kind,
            own,
            response,
        } = self;
        let kind = kind.as_deref();
        let ends_response = matches!(
            kind,
            Some("response.completed" | "response.incomplete" | "response.failed")
        );
        let response = match kind {
            _ if ends_response => response,
            None if own.named.as_deref() == Some("response") => own,
            _ => Response::default(),
        };
        let reason = response.incomplete.or(response.status);
        facts.response_id = response.id.or(facts.response_id.take());
        let rest_is_empty =
            cuts_member && (kept == 0 || empty_choices && !has_usage && !found.error);
        facts.handle = found.handle.or(facts.handle.take());
        facts.prompt_tokens = found.prompt_tokens.or(facts.prompt_tokens);
        facts.cached_tokens = found.cached_tokens.or(facts.cached_tokens);
        facts.completion_tokens = found.completion_tokens.or(facts.completion_tokens);
        facts.finish_reason = reason
            .or(found.finish_reason)
            .or(facts.finish_reason.take());
        facts.prompt_token_ids.replace(found.prompt_token_ids);
        facts.token_ids.extend(found.token_ids);
        facts.error |= found.error || matches!(kind, Some("error" | "response.failed"));
        facts.done |= ends_response || kind == Some("message_stop");
        if cuts.is_empty() {
            Verdict::Keep
        } else {
            Verdict::Edit {
                cuts,
                rest_is_empty,
            }
        }
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

fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
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
