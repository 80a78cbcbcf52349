//! One strict pass over a JSON text (RFC 8259), without recursion and without building anything.

use std::ops::Range;

use super::error::{BodyError, ErrorKind};
use super::text::next_special;

/// Levels of arrays and objects that a body may nest, its own object included.
///
/// Far above what templates and tool schemas use, and below where recursive parsers behind the gateway give up.
pub const MAX_DEPTH: usize = 512;

/// A scanner over `text`, which must be UTF-8 as a whole: bytes above ASCII are not looked at again.
pub(super) struct Scanner<'a> {
    pub(super) text: &'a [u8],
    pub(super) position: usize,
}

/// A value that was passed over.
pub(super) struct Value {
    /// Where its text lies, without the space around it.
    pub(super) span: Range<usize>,
    /// Elements of an array, members of an object, 0 for everything else.
    pub(super) elements: usize,
}

/// The containers that are open, one bit each: set for an object.
struct Open {
    bits: [u64; MAX_DEPTH / 64],
    depth: usize,
}

impl Open {
    fn new() -> Self {
        Self {
            bits: [0; MAX_DEPTH / 64],
            depth: 0,
        }
    }

    fn push(&mut self, object: bool) {
        let (word, bit) = (self.depth / 64, 1 << (self.depth % 64));
        if object {
            self.bits[word] |= bit;
        } else {
            self.bits[word] &= !bit;
        }
        self.depth += 1;
    }

    /// Closes the innermost container; says whether the one around it, if there is one, is an object.
    fn pop(&mut self) -> bool {
        self.depth -= 1;
        let top = self.depth.wrapping_sub(1);
        self.depth > 0 && self.bits[top / 64] >> (top % 64) & 1 == 1
    }
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a [u8]) -> Self {
        Self { text, position: 0 }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.get(self.position).copied()
    }

    /// Passes over space; gives the byte behind it, which stays unread.
    pub(super) fn skip_space(&mut self) -> Option<u8> {
        while let Some(byte) = self.peek() {
            if byte > b' ' || !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.position += 1;
        }
        None
    }

    pub(super) fn error(&self, what: &'static str) -> BodyError {
        self.error_at(self.position, what)
    }

    fn error_at(&self, offset: usize, what: &'static str) -> BodyError {
        let what = if offset < self.text.len() {
            what
        } else {
            "it ends too early"
        };
        ErrorKind::NotJson(what).at(offset)
    }

    /// Passes over a string; gives its inside.
    pub(super) fn string(&mut self) -> Result<Range<usize>, BodyError> {
        if self.peek() != Some(b'"') {
            return Err(self.error("a string is expected"));
        }
        let start = self.position + 1;
        let mut position = start;
        while let Some(step) = next_special(&self.text[position..]) {
            position += step;
            match (self.text[position], self.text.get(position + 1)) {
                (b'"', _) => {
                    self.position = position + 1;
                    return Ok(start..position);
                }
                (b'\\', Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't')) => {
                    position += 2;
                }
                (b'\\', Some(b'u')) => {
                    let digits = self.text[position + 2..].iter().take(4);
                    let valid = digits.take_while(|byte| byte.is_ascii_hexdigit()).count();
                    position += 2 + valid;
                    if valid < 4 {
                        return Err(
                            self.error_at(position, "a \\u escape needs four hexadecimal digits")
                        );
                    }
                }
                (b'\\', _) => {
                    return Err(self.error_at(position + 1, "an unknown escape in a string"));
                }
                _ => {
                    return Err(
                        self.error_at(position, "a control character in a string is not escaped")
                    );
                }
            }
        }
        Err(self.error_at(self.text.len(), "a string does not end"))
    }

    fn number(&mut self) -> Result<(), BodyError> {
        if self.peek() == Some(b'-') {
            self.position += 1;
        }
        if self.peek() == Some(b'0') {
            self.position += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.position += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.position += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.position += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), BodyError> {
        let rest = &self.text[self.position..];
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 {
            return Err(self.error("a number lacks a digit"));
        }
        self.position += count;
        Ok(())
    }

    fn literal(&mut self, word: &[u8]) -> Result<(), BodyError> {
        if !self.text[self.position..].starts_with(word) {
            return Err(self.error("a value is expected"));
        }
        self.position += word.len();
        Ok(())
    }

    /// Passes over the key of a member and the colon behind it; gives the inside of the key.
    pub(super) fn key(&mut self) -> Result<Range<usize>, BodyError> {
        if self.skip_space() != Some(b'"') {
            return Err(self.error("the name of a member is expected"));
        }
        let key = self.string()?;
        if self.skip_space() != Some(b':') {
            return Err(self.error("a colon is expected"));
        }
        self.position += 1;
        Ok(key)
    }

    /// Passes over one value that stands inside `outer` containers.
    pub(super) fn value(&mut self, outer: usize) -> Result<Value, BodyError> {
        let first = self.skip_space();
        let start = self.position;
        if !matches!(first, Some(b'{' | b'[')) {
            self.scalar(first)?;
            return Ok(Value {
                span: start..self.position,
                elements: 0,
            });
        }
        let elements = self.container(outer)?;
        Ok(Value {
            span: start..self.position,
            elements,
        })
    }

    fn scalar(&mut self, first: Option<u8>) -> Result<(), BodyError> {
        match first {
            Some(b'"') => self.string().map(drop),
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.literal(b"true"),
            Some(b'f') => self.literal(b"false"),
            Some(b'n') => self.literal(b"null"),
            _ => Err(self.error("a value is expected")),
        }
    }

    /// Passes over an array or an object; gives the number of its own elements.
    fn container(&mut self, outer: usize) -> Result<usize, BodyError> {
        let mut open = Open::new();
        let mut elements = 0;
        // Whether the innermost open container is an object.
        let mut object = false;
        loop {
            // A value is due.
            let first = self.skip_space();
            let empty = if let Some(bracket @ (b'{' | b'[')) = first {
                if open.depth + outer == MAX_DEPTH {
                    return Err(ErrorKind::TooDeep.at(self.position));
                }
                object = bracket == b'{';
                open.push(object);
                self.position += 1;
                // In ASCII a closing bracket is two above its opening one.
                if self.skip_space() != Some(bracket + 2) {
                    elements += usize::from(open.depth == 1);
                    if object {
                        self.key()?;
                    }
                    continue;
                }
                true
            } else {
                self.scalar(first)?;
                false
            };
            // A value has ended, or an empty container is about to: closing brackets or a comma are due.
            if empty {
                self.position += 1;
                object = open.pop();
            }
            loop {
                if open.depth == 0 {
                    return Ok(elements);
                }
                match (self.skip_space(), object) {
                    (Some(b','), _) => {
                        self.position += 1;
                        elements += usize::from(open.depth == 1);
                        if object {
                            self.key()?;
                        }
                        break;
                    }
                    (Some(b'}'), true) | (Some(b']'), false) => {
                        self.position += 1;
                        object = open.pop();
                    }
                    (_, true) => {
                        return Err(self.error("a comma or the end of an object is expected"));
                    }
                    (_, false) => {
                        return Err(self.error("a comma or the end of an array is expected"));
                    }
                }
            }
        }
    }
}

/// Whether `text` is one valid JSON value with nothing but space around it.
#[must_use]
pub fn is_json(text: &[u8]) -> bool {
    let mut scanner = Scanner::new(text);
    simdutf8::basic::from_utf8(text).is_ok()
        && scanner.value(0).is_ok()
        && scanner.skip_space().is_none()
}
