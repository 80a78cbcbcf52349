//! A request body as the bytes the client sent, with a map of its top-level members.
//!
//! The gateway never parses a body into a tree and writes it again: that rounds numbers, loses duplicates and moves
//! keys, which changes prompts and kills the engines' prefix caches. One pass checks the grammar and notes where
//! each member lies; edits are splices into the text ([`Edits`]), so every byte outside of them stays.

mod edit;
mod error;
mod messages;
mod owned;
mod scan;
mod text;

use std::ops::Range;

pub use edit::{EditError, Edits, Splice};
pub use error::{BodyError, ErrorKind};
pub use messages::MessageDigest;
pub use owned::OWNED;
pub use scan::{MAX_DEPTH, is_json};

use scan::Scanner;

/// Longest `conversation_id`, in bytes of UTF-8. It becomes a key in the conversation store, so it has a bound.
pub const MAX_CONVERSATION_ID: usize = 256;

/// Most members at the top of a body. The map of them takes ten times the memory of the shortest members, and finding
/// one in it looks at all; no API of an engine has a tenth as many.
pub const MAX_MEMBERS: usize = 4096;

/// A scanned request body over bytes that `B` holds.
#[derive(Debug)]
pub struct Body<B> {
    bytes: B,
    members: Vec<Member>,
    /// Offset of the brace that closes the body's object.
    close: usize,
    model: Option<Box<str>>,
    conversation_id: Option<Box<str>>,
    stream: bool,
}

/// One top-level member.
#[derive(Debug)]
struct Member {
    /// Where the member starts: the opening quote of its key.
    start: usize,
    name: Name,
    /// Where its value's text lies.
    value: Range<usize>,
    /// Elements of its value when that is an array.
    elements: usize,
}

#[derive(Debug)]
enum Name {
    /// A key without escapes: it lies in the body.
    Plain(Range<usize>),
    /// A key with escapes, unescaped.
    Unescaped(Box<[u8]>),
}

impl<B: AsRef<[u8]>> Body<B> {
    /// Scans a body in one pass over its bytes; nothing of it is copied but escaped keys, `model` and
    /// `conversation_id`.
    ///
    /// # Errors
    /// When the bytes are not UTF-8, not JSON, not an object, nest deeper than [`MAX_DEPTH`] or have more than
    /// [`MAX_MEMBERS`] members, when a member of [`OWNED`] is there twice, and when a member by which the gateway must decide cannot be decided by: `model` and
    /// `conversation_id` are strings (the latter of at most [`MAX_CONVERSATION_ID`] bytes), `stream` is a boolean,
    /// `kv_transfer_params` an object, and each may be null. Every other value is left to the engine to judge.
    pub fn scan(bytes: B) -> Result<Self, BodyError> {
        let text = bytes.as_ref();
        if let Err(error) = simdutf8::compat::from_utf8(text) {
            return Err(ErrorKind::InvalidUtf8.at(error.valid_up_to()));
        }
        let mut scanner = Scanner::new(text);
        enter_object(&mut scanner)?;
        let mut members = Vec::with_capacity(16);
        let mut seen = owned::Seen::default();
        let (mut model, mut conversation_id, mut stream) = (None, None, false);
        let mut next = scanner.skip_space() != Some(b'}');
        while next {
            scanner.skip_space();
            let start = scanner.position;
            if members.len() == MAX_MEMBERS {
                return Err(ErrorKind::TooManyMembers.at(start));
            }
            let key = scanner.key()?;
            let value = scanner.value(1)?;
            let name = Name::new(text, key);
            if let Some(position) = owned::position(name.bytes(text)) {
                let name = OWNED[position];
                if !seen.insert(position) {
                    return Err(ErrorKind::DuplicateMember(name).at(start));
                }
                let raw = &text[value.span.clone()];
                let read = match name {
                    "model" => string(raw, usize::MAX).map(|text| model = text),
                    "conversation_id" => {
                        string(raw, MAX_CONVERSATION_ID).map(|text| conversation_id = text)
                    }
                    "stream" => boolean(raw).map(|flag| stream = flag),
                    "kv_transfer_params" if raw[0] != b'{' && raw != b"null" => {
                        Err("an object or null")
                    }
                    _ => Ok(()),
                };
                if let Err(allowed) = read {
                    return Err(ErrorKind::WrongType {
                        member: name,
                        allowed,
                    }
                    .at(value.span.start));
                }
            }
            members.push(Member {
                start,
                name,
                value: value.span,
                elements: value.elements,
            });
            next = match scanner.skip_space() {
                Some(b',') => {
                    scanner.position += 1;
                    true
                }
                Some(b'}') => false,
                _ => return Err(scanner.error("a comma or the end of the object is expected")),
            };
        }
        let close = scanner.position;
        scanner.position += 1;
        if scanner.skip_space().is_some() {
            return Err(scanner.error("there is text behind the object"));
        }
        Ok(Self {
            bytes,
            members,
            close,
            model,
            conversation_id,
            stream,
        })
    }

    /// The bytes that were scanned.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }

    /// The holder of the bytes that were scanned.
    pub fn source(&self) -> &B {
        &self.bytes
    }

    /// `model`, `None` when absent or null.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// `conversation_id`, `None` when absent or null.
    pub fn conversation_id(&self) -> Option<&str> {
        self.conversation_id.as_deref()
    }

    /// `stream`; absent and null are false, as for the engine.
    pub const fn stream(&self) -> bool {
        self.stream
    }

    /// The text of `kv_transfer_params`, `None` when absent or null.
    pub fn kv_transfer_params(&self) -> Option<&[u8]> {
        self.raw("kv_transfer_params").filter(|raw| *raw != b"null")
    }

    /// The text of a top-level member's value, without the space around it; `None` when the member is absent.
    ///
    /// Of an unowned member that is there more than once it is the last, the one that engines read.
    pub fn raw(&self, name: &str) -> Option<&[u8]> {
        self.member(name).map(|member| self.text(member))
    }

    /// The names of the top-level members in their order, duplicates included. What is not Unicode in a name reads as U+FFFD.
    pub fn names(&self) -> impl Iterator<Item = std::borrow::Cow<'_, str>> {
        self.members
            .iter()
            .map(|member| String::from_utf8_lossy(member.name.bytes(self.bytes())))
    }

    /// The text of a member's value.
    fn text(&self, member: &Member) -> &[u8] {
        &self.bytes()[member.value.clone()]
    }

    fn member(&self, name: &str) -> Option<&Member> {
        let text = self.bytes();
        self.members
            .iter()
            .rev()
            .find(|member| member.name.bytes(text) == name.as_bytes())
    }
}

impl Name {
    fn new(text: &[u8], key: Range<usize>) -> Self {
        if memchr::memchr(b'\\', &text[key.clone()]).is_none() {
            Self::Plain(key)
        } else {
            Self::Unescaped(text::unescape(&text[key]).into())
        }
    }

    /// The name as UTF-8, or as [`text::unescape`] says when it is not Unicode.
    fn bytes<'a>(&'a self, text: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Plain(key) => &text[key.clone()],
            Self::Unescaped(name) => name,
        }
    }
}

fn enter_object(scanner: &mut Scanner<'_>) -> Result<(), BodyError> {
    match scanner.skip_space() {
        Some(b'{') => scanner.position += 1,
        Some(b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n') => {
            return Err(ErrorKind::NotAnObject.at(scanner.position));
        }
        Some(_) if scanner.text.starts_with(b"\xef\xbb\xbf") => {
            return Err(scanner.error("it starts with a byte order mark"));
        }
        Some(_) => return Err(scanner.error("it does not start with an object")),
        None => return Err(ErrorKind::NotJson("it is empty").at(scanner.position)),
    }
    Ok(())
}

/// Reads a string or null; the error says what is allowed.
fn string(raw: &[u8], limit: usize) -> Result<Option<Box<str>>, &'static str> {
    match raw {
        b"null" => Ok(None),
        [b'"', inside @ .., b'"'] => {
            let text = String::from_utf8(text::unescape(inside))
                .map_err(|_| "Unicode text: it has a lone surrogate")?;
            if text.len() > limit {
                return Err("at most 256 bytes long");
            }
            Ok(Some(text.into()))
        }
        _ => Err("a string or null"),
    }
}

fn boolean(raw: &[u8]) -> Result<bool, &'static str> {
    match raw {
        b"true" => Ok(true),
        b"false" | b"null" => Ok(false),
        _ => Err("true, false or null"),
    }
}
