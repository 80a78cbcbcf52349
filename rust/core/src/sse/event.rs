//! The lines of server-sent events.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr2;

/// Finds where events end.
#[derive(Debug)]
pub(super) struct Lines {
    /// Bytes of the event under way so far.
    pub(super) event_bytes: usize,
    line_is_empty: bool,
    /// The last byte was a CR: an LF now belongs to the same line end.
    pub(super) after_cr: bool,
}

impl Default for Lines {
    fn default() -> Self {
        Self {
            event_bytes: 0,
            line_is_empty: true,
            after_cr: false,
        }
    }
}

impl Lines {
    /// The first byte after the event under way, if its end is in `data[from..]`, which is not empty.
    pub(super) fn event_end(&mut self, data: &[u8], from: usize) -> Option<usize> {
        let mut at = from;
        if std::mem::take(&mut self.after_cr) && data[at] == b'\n' {
            at += 1;
        }
        while let Some(length) = memchr2(b'\n', b'\r', &data[at..]) {
            let blank = self.line_is_empty && length == 0;
            let line_end = at + length;
            at = line_end + 1;
            if data[line_end] == b'\r' {
                self.after_cr = at == data.len();
                at += usize::from(data.get(at) == Some(&b'\n'));
            }
            self.line_is_empty = true;
            if blank {
                self.event_bytes += at - from;
                return Some(at);
            }
        }
        self.line_is_empty &= at == data.len();
        self.event_bytes += data.len() - from;
        None
    }
}

/// The fields of one event that matter here.
pub(super) struct Fields<'a> {
    event: &'a [u8],
    pub(super) name: &'a [u8],
    /// Where the value of the first `data` line is.
    data: Option<Range<usize>>,
    /// Where those of further ones are: no engine sends any, but the format has them.
    more: Vec<Range<usize>>,
}

impl<'a> Fields<'a> {
    pub(super) fn of(event: &'a [u8]) -> Self {
        let mut fields = Self {
            event,
            name: b"",
            data: None,
            more: Vec::new(),
        };
        let mut at = if event.starts_with(b"\xef\xbb\xbf") {
            3
        } else {
            0
        };
        while at < event.len() {
            let end = memchr2(b'\n', b'\r', &event[at..]).map_or(event.len(), |length| at + length);
            let line = &event[at..end];
            let value = |name: usize| {
                let start = (at + name + 1).min(end);
                start + usize::from(event[start..end].first() == Some(&b' '))..end
            };
            if line.starts_with(b"data:") || line == b"data" {
                match fields.data {
                    None => fields.data = Some(value(4)),
                    Some(_) => fields.more.push(value(4)),
                }
            } else if line.starts_with(b"event:") {
                fields.name = &event[value(5)];
            }
            at = end + 1;
        }
        fields
    }

    /// The data of the event: its lines, with LF between them.
    pub(super) fn data(&self) -> Option<Cow<'a, [u8]>> {
        let mut text = Cow::Borrowed(&self.event[self.data.clone()?]);
        for line in &self.more {
            text.to_mut().push(b'\n');
            text.to_mut().extend_from_slice(&self.event[line.clone()]);
        }
        Some(text)
    }

    /// The event with this text as its data. All of its lines come where the first one was.
    pub(super) fn with_data(&self, text: &[u8]) -> Vec<u8> {
        let event = self.event;
        let Some(first) = &self.data else {
            return event.to_vec();
        };
        let mut out = Vec::with_capacity(event.len());
        out.extend_from_slice(&event[..first.start]);
        let mut at = first.end;
        for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
            if index > 0 {
                out.extend_from_slice(&event[at..line_after(event, at)]);
                out.extend_from_slice(b"data: ");
            }
            out.extend_from_slice(line);
        }
        for line in &self.more {
            let start = event[..line.start]
                .iter()
                .rposition(|byte| matches!(byte, b'\n' | b'\r'))
                .map_or(0, |end| end + 1);
            out.extend_from_slice(&event[at..start]);
            at = line_after(event, line.end);
        }
        out.extend_from_slice(&event[at..]);
        out
    }
}

/// The first byte of the next line, where `at` is the end of one.
fn line_after(event: &[u8], at: usize) -> usize {
    match event[at..] {
        [b'\r', b'\n', ..] => at + 2,
        [b'\r' | b'\n', ..] => at + 1,
        _ => at,
    }
}
