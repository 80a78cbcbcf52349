//! Server-sent events over reads that are cut anywhere.

use std::ops::Range;

use super::event::{Fields, Lines};
use super::{Cut, Facts, Rules, Verdict, inspect};

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
///
/// Where the rules only observe, every byte goes on at once, and a copy of an incomplete event is kept only to read it.
/// Where they hide something, only complete events go on.
#[derive(Debug)]
pub struct Scanner {
    rules: Rules,
    hides: bool,
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
    pub fn new(rules: Rules, limit: usize) -> Self {
        Self {
            hides: !rules.only_observe(),
            rules,
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
        self.lines.event_bytes == 0 || self.hides
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
        if self.hides {
            return self.hide(data, out);
        }
        self.observe(data);
        Ok(Pass::Same)
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
        if self.hides {
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
        if !self.rules.may_tell(&text) {
            return Shown::Whole;
        }
        match inspect(&text, &self.rules, &mut self.facts) {
            Verdict::Keep => Shown::Whole,
            Verdict::Edit {
                rest_is_empty: true,
                ..
            }
            | Verdict::Unreadable => Shown::Nothing,
            Verdict::Edit { cuts, .. } => Shown::Edited(fields.with_data(&Cut::make(&cuts, &text))),
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
