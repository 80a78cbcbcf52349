//! An answer that is one JSON object.

use super::{Cut, Facts, Rules, Verdict, inspect};

/// Watches a body that goes on to the client while it comes, and reads it once it is whole.
///
/// A body in one read is read in place. One in several reads is kept until its end, up to a limit; beyond it, the body
/// tells nothing.
#[derive(Debug)]
pub struct Document {
    kept: Vec<u8>,
    limit: usize,
    overflowed: bool,
    rules: Rules,
    facts: Facts,
}

impl Document {
    /// A document of which at most `limit` bytes are kept. Nothing of it is hidden, whatever the rules say.
    #[must_use]
    pub fn new(rules: Rules, limit: usize) -> Self {
        Self {
            kept: Vec::new(),
            limit,
            overflowed: false,
            rules,
            facts: Facts::default(),
        }
    }

    /// Takes the next piece of the body.
    pub fn feed(&mut self, piece: &[u8]) {
        if self.overflowed || self.kept.len() + piece.len() > self.limit {
            self.overflowed = true;
            self.kept = Vec::new();
        } else {
            self.kept.extend_from_slice(piece);
        }
    }

    /// Reads the whole body: what was fed before, then this last piece.
    pub fn finish(&mut self, last: &[u8]) {
        if !self.kept.is_empty() || last.len() > self.limit {
            self.feed(last);
            let kept = std::mem::take(&mut self.kept);
            inspect(&kept, &self.rules, &mut self.facts);
        } else if !self.overflowed {
            inspect(last, &self.rules, &mut self.facts);
        }
    }

    /// What the body told, once it is finished.
    #[must_use]
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The body as the client may see it, or `None` if that is as it came; and what it told.
    ///
    /// # Errors
    ///
    /// [`Unreadable`] if the body names a hidden member but is not JSON, so that it cannot be taken out.
    pub fn take_hidden(body: &[u8], rules: &Rules) -> Result<(Option<Vec<u8>>, Facts), Unreadable> {
        let mut facts = Facts::default();
        match inspect(body, rules, &mut facts) {
            Verdict::Keep => Ok((None, facts)),
            Verdict::Edit { cuts, .. } => Ok((Some(Cut::make(&cuts, body)), facts)),
            Verdict::Unreadable => Err(Unreadable),
        }
    }
}

/// The body is no JSON, yet names a member that must be hidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the answer is not valid JSON, so what must be hidden from the client cannot be taken out")]
pub struct Unreadable;
