//! Server-sent events over reads that are cut anywhere.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr2;

use super::document::without;
use super::{Facts, Hidden, Verdict, inspect};

/// What the scanner may do with the bytes.
#[derive(Clone, Debug)]
pub enum Mode {
    /// Every byte goes on at once; the scanner keeps a copy of an incomplete event only to read it.
    Observe,
    /// Only complete events go on, without the hidden members.
    Hide(Hidden),
}

/// What goes on to the client of a piece of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The piece itself, all of it and nothing else.
    Same,
    /// What was appended to the output in its place, possibly nothing.
    Edited,
}

/// An event is longer than may be held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {limit} bytes")]
pub struct EventTooLarge {
    /// The limit, in bytes of one event with its line ends.
    pub limit: usize,
}

/// Follows one event stream. Lines end with LF, CRLF or CR, also mixed; a blank line ends an event.
#[derive(Debug)]
pub struct Scanner {
    mode: Mode,
    limit: usize,
    /// The start of an event whose end has not come yet; empty while an observed event is above the limit.
    residue: Vec<u8>,
    lines: Lines,
    /// The event before ended with a CR at the end of a read, and was shown or not: so is the LF that may follow.
    split_end: Option<bool>,
    facts: Facts,
}

/// What becomes of one event.
enum Shown {
    Whole,
    Edited(Vec<u8>),
    Nothing,
}

impl Scanner {
    /// A scanner at the start of a stream. `limit` is the most bytes of one event: above it, hiding fails and observing
    /// does not read that event.
    #[must_use]
    pub fn new(mode: Mode, limit: usize) -> Self {
        Self {
            mode,
            limit,
            residue: Vec::new(),
            lines: Lines::default(),
            split_end: None,
            facts: Facts::default(),
        }
    }

    /// What the events so far have told.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Whether what went on to the client so far ends with a whole event, so that one of the gateway's own may follow.
    #[must_use]
    pub fn at_boundary(&self) -> bool {
        self.lines.event_bytes == 0 || matches!(self.mode, Mode::Hide(_))
    }

    /// Takes the next piece of the stream.
    ///
    /// # Errors
    ///
    /// [`EventTooLarge`] when hiding. The scanner is of no use then; what was appended to `out` are whole events, which
    /// may go on.
    pub fn feed(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Pass, EventTooLarge> {
        if data.is_empty() {
            return Ok(Pass::Same);
        }
        match self.mode {
            Mode::Observe => {
                self.observe(data);
                Ok(Pass::Same)
            }
            Mode::Hide(_) => self.hide(data, out),
        }
    }

    /// The stream has ended. An event that no blank line ended is appended to `out`, as far as the client may see it:
    /// clients discard such an event, but its bytes are the engine's to send.
    pub fn finish(&mut self, out: &mut Vec<u8>) {
        let event = std::mem::take(&mut self.residue);
        self.lines.event_bytes = 0;
        if event.is_empty() {
            return;
        }
        let shown = self.read(&event);
        if matches!(self.mode, Mode::Hide(_)) {
            match shown {
                Shown::Whole => out.extend_from_slice(&event),
                Shown::Edited(text) => out.extend_from_slice(&text),
                Shown::Nothing => {}
            }
        }
    }

    fn observe(&mut self, data: &[u8]) {
        let mut at = usize::from(self.split_end.take().is_some() && data[0] == b'\n');
        while at < data.len() {
            let end = self.lines.event_end(data, at);
            let piece = &data[at..end.unwrap_or(data.len())];
            at += piece.len();
            let readable = self.lines.event_bytes <= self.limit;
            if end.is_some() {
                self.end_event(true);
                if !readable {
                    self.residue = Vec::new();
                } else if self.residue.is_empty() {
                    self.read(piece);
                } else {
                    let mut event = std::mem::take(&mut self.residue);
                    event.extend_from_slice(piece);
                    self.read(&event);
                    event.clear();
                    self.residue = event;
                }
            } else if readable {
                self.residue.extend_from_slice(piece);
            } else {
                self.residue = Vec::new();
            }
        }
    }

    fn hide(&mut self, data: &[u8], out: &mut Vec<u8>) -> Result<Pass, EventTooLarge> {
        let mut same = Same {
            data,
            end: self.residue.is_empty().then_some(0),
        };
        let mut at = 0;
        if let Some(shown) = self.split_end.take() {
            if data[0] == b'\n' {
                at = 1;
                if shown {
                    same.show(0..1, out);
                } else {
                    same.leave(out);
                }
            }
        }
        while at < data.len() {
            let start = at;
            let end = self.lines.event_end(data, start);
            if self.lines.event_bytes > self.limit {
                same.leave(out);
                return Err(EventTooLarge { limit: self.limit });
            }
            let Some(end) = end else {
                same.leave(out);
                self.residue.extend_from_slice(&data[start..]);
                break;
            };
            at = end;
            let shown = if self.residue.is_empty() {
                self.read(&data[start..end])
            } else {
                let mut event = std::mem::take(&mut self.residue);
                event.extend_from_slice(&data[start..end]);
                match self.read(&event) {
                    Shown::Whole => Shown::Edited(event),
                    other => other,
                }
            };
            self.end_event(!matches!(shown, Shown::Nothing));
            match shown {
                Shown::Whole => same.show(start..end, out),
                Shown::Edited(text) => {
                    same.leave(out);
                    out.extend_from_slice(&text);
                }
                Shown::Nothing => same.leave(out),
            }
        }
        Ok(if same.end.is_some() {
            Pass::Same
        } else {
            Pass::Edited
        })
    }

    fn end_event(&mut self, shown: bool) {
        self.lines.event_bytes = 0;
        self.split_end = std::mem::take(&mut self.lines.after_cr).then_some(shown);
    }

    /// Reads one event: adds what it tells to the facts, and says what of it the client may see.
    fn read(&mut self, event: &[u8]) -> Shown {
        let fields = Fields::of(event);
        match fields.name {
            b"message_stop" | b"response.completed" | b"response.incomplete" => {
                self.facts.done = true;
            }
            b"response.failed" => (self.facts.done, self.facts.error) = (true, true),
            b"error" => self.facts.error = true,
            _ => {}
        }
        let Some(text) = fields.data() else {
            return Shown::Whole;
        };
        if text.trim_ascii() == b"[DONE]" {
            self.facts.done = true;
            return Shown::Whole;
        }
        let nothing;
        let hidden = match &self.mode {
            Mode::Hide(hidden) => hidden,
            Mode::Observe => {
                nothing = Hidden::nothing();
                &nothing
            }
        };
        match inspect(&text, hidden, &mut self.facts) {
            Verdict::Keep => Shown::Whole,
            Verdict::Cut {
                rest_is_empty: true,
                ..
            }
            | Verdict::Unreadable => Shown::Nothing,
            Verdict::Cut { cuts, .. } => Shown::Edited(fields.with_data(&without(&text, &cuts))),
        }
    }
}

/// How far a piece goes on as it came, uncopied.
struct Same<'a> {
    data: &'a [u8],
    /// `None` once the output differs from the piece: from there on all is copied.
    end: Option<usize>,
}

impl Same<'_> {
    fn show(&mut self, part: Range<usize>, out: &mut Vec<u8>) {
        match &mut self.end {
            Some(end) => *end = part.end,
            None => out.extend_from_slice(&self.data[part]),
        }
    }

    fn leave(&mut self, out: &mut Vec<u8>) {
        if let Some(end) = self.end.take() {
            out.extend_from_slice(&self.data[..end]);
        }
    }
}

/// Finds where events end.
#[derive(Debug)]
struct Lines {
    /// Bytes of the event under way so far.
    event_bytes: usize,
    line_is_empty: bool,
    /// The last byte was a CR: an LF now belongs to the same line end.
    after_cr: bool,
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
    fn event_end(&mut self, data: &[u8], from: usize) -> Option<usize> {
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
struct Fields<'a> {
    event: &'a [u8],
    name: &'a [u8],
    /// Where the value of the first `data` line is.
    data: Option<Range<usize>>,
    /// Where those of further ones are: no engine sends any, but the format has them.
    more: Vec<Range<usize>>,
}

impl<'a> Fields<'a> {
    fn of(event: &'a [u8]) -> Self {
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
    fn data(&self) -> Option<Cow<'a, [u8]>> {
        let mut text = Cow::Borrowed(&self.event[self.data.clone()?]);
        for line in &self.more {
            text.to_mut().push(b'\n');
            text.to_mut().extend_from_slice(&self.event[line.clone()]);
        }
        Some(text)
    }

    /// The event with this text as its data. All of its lines come where the first one was.
    fn with_data(&self, text: &[u8]) -> Vec<u8> {
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
