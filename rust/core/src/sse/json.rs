//! Walking the members of a JSON object without building it.
//!
//! Values are skipped, not validated: a string ends at its first quote that is not escaped, an object or array where its
//! brackets balance. For valid JSON this gives what a parser gives; for anything else it ends or says [`Malformed`].
//! Nothing here recurses, so depth costs nothing.

use std::ops::Range;

use memchr::memchr2;

/// The text does not go on as JSON would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// One member of an object; both ranges are places in the text.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// The key with its quotes, escapes as they came.
    pub(super) key: Range<usize>,
    pub(super) value: Range<usize>,
}

/// The members of the object that starts at a `{`, in order. Ends after the first error.
pub(super) struct Members<'a> {
    items: Items<'a>,
}

impl<'a> Members<'a> {
    pub(super) fn new(text: &'a [u8], at: usize) -> Self {
        Self {
            items: Items::new(text, at, b'{', b'}'),
        }
    }

    /// The first byte after the object, once all members were taken.
    pub(super) fn end(&self) -> usize {
        self.items.at
    }
}

impl Iterator for Members<'_> {
    type Item = Result<Member, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = match self.items.start()? {
            Ok(start) => start,
            Err(malformed) => return Some(Err(malformed)),
        };
        let text = self.items.text;
        let member = string_end(text, start).and_then(|key_end| {
            let colon = skip_space(text, key_end);
            (text.get(colon) == Some(&b':')).then_some(())?;
            let value = skip_space(text, colon + 1);
            Some(Member {
                key: start..key_end,
                value: value..value_end(text, value)?,
            })
        });
        Some(self.items.finish(member, |member| member.value.end))
    }
}

/// The values of the array that starts at a `[`, in order. Ends after the first error.
pub(super) struct Elements<'a> {
    items: Items<'a>,
}

impl<'a> Elements<'a> {
    pub(super) fn new(text: &'a [u8], at: usize) -> Self {
        Self {
            items: Items::new(text, at, b'[', b']'),
        }
    }
}

impl Iterator for Elements<'_> {
    type Item = Result<Range<usize>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = match self.items.start()? {
            Ok(start) => start,
            Err(malformed) => return Some(Err(malformed)),
        };
        let value = value_end(self.items.text, start).map(|end| start..end);
        Some(self.items.finish(value, |value| value.end))
    }
}

/// What objects and arrays share: items with commas between them, and a closing bracket.
struct Items<'a> {
    text: &'a [u8],
    at: usize,
    close: u8,
    first: bool,
    done: bool,
}

impl<'a> Items<'a> {
    fn new(text: &'a [u8], at: usize, open: u8, close: u8) -> Self {
        debug_assert_eq!(text.get(at), Some(&open));
        Self {
            text,
            at: at + 1,
            close,
            first: true,
            done: false,
        }
    }

    /// Where the next item starts; `None` after the last.
    fn start(&mut self) -> Option<Result<usize, Malformed>> {
        if self.done {
            return None;
        }
        let at = skip_space(self.text, self.at);
        let start = match self.text.get(at) {
            Some(&byte) if byte == self.close => {
                self.done = true;
                self.at = at + 1;
                return None;
            }
            Some(b',') if !self.first => Some(skip_space(self.text, at + 1)),
            Some(_) if self.first => Some(at),
            _ => None,
        };
        self.first = false;
        self.done = start.is_none();
        Some(start.ok_or(Malformed))
    }

    fn finish<T>(&mut self, item: Option<T>, end: impl Fn(&T) -> usize) -> Result<T, Malformed> {
        if let Some(item) = item {
            self.at = end(&item);
            Ok(item)
        } else {
            self.done = true;
            Err(Malformed)
        }
    }
}

pub(super) fn skip_space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// The first byte after the string whose opening quote is at `at`.
fn string_end(text: &[u8], at: usize) -> Option<usize> {
    if text.get(at) != Some(&b'"') {
        return None;
    }
    let mut at = at + 1;
    loop {
        let found = at + memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[found] == b'"' {
            return Some(found + 1);
        }
        at = found + 2;
    }
}

/// The first byte after the value at `at`.
fn value_end(text: &[u8], at: usize) -> Option<usize> {
    match text.get(at)? {
        b'"' => string_end(text, at),
        b'{' | b'[' => brackets_end(text, at),
        b',' | b':' | b'}' | b']' => None,
        _ => {
            let is_end = |byte: &u8| {
                matches!(
                    byte,
                    b',' | b':' | b'}' | b']' | b'"' | b' ' | b'\t' | b'\n' | b'\r'
                )
            };
            Some(
                text[at..]
                    .iter()
                    .position(is_end)
                    .map_or(text.len(), |length| at + length),
            )
        }
    }
}

fn brackets_end(text: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    loop {
        match text.get(at)? {
            b'"' => {
                at = string_end(text, at)?;
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// The text of a string given with its quotes, escapes resolved. `None` if it is not a string or an escape is not JSON.
pub(super) fn unescape(quoted: &[u8]) -> Option<String> {
    let inner = quoted.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let text = String::from_utf8_lossy(inner);
    if !text.contains('\\') {
        return Some(text.into_owned());
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(character) = rest.next() {
        if character != '\\' {
            out.push(character);
            continue;
        }
        out.push(match rest.next()? {
            character @ ('"' | '\\' | '/') => character,
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let high = hex4(&mut rest)?;
                if (0xd800..0xdc00).contains(&high) {
                    let mut ahead = rest.clone();
                    let low = (ahead.next() == Some('\\') && ahead.next() == Some('u'))
                        .then(|| hex4(&mut ahead))
                        .flatten();
                    match low.filter(|low| (0xdc00..0xe000).contains(low)) {
                        Some(low) => {
                            rest = ahead;
                            char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00))?
                        }
                        None => char::REPLACEMENT_CHARACTER,
                    }
                } else {
                    char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
            }
            _ => return None,
        });
    }
    Some(out)
}

fn hex4(rest: &mut std::str::Chars<'_>) -> Option<u32> {
    let mut value = 0;
    for _ in 0..4 {
        value = value << 4 | rest.next()?.to_digit(16)?;
    }
    Some(value)
}
