//! Edits of top-level members as splices: the text outside of them stays as it came, byte for byte.

use std::ops::Range;

use thiserror::Error;

use super::scan::is_json;
use super::{Body, text};

/// What to do to a body's top-level members; compiled once and used for many bodies.
#[derive(Debug, Default)]
pub struct Edits(Vec<Edit>);

#[derive(Debug)]
struct Edit {
    name: Box<str>,
    action: Action,
}

#[derive(Debug)]
enum Action {
    Drop,
    Set {
        /// `"name":value`, as it is appended where the member is absent.
        member: Box<[u8]>,
        /// Where the value starts in `member`.
        value: usize,
    },
}

/// An edit that would not leave valid JSON, or says two things.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EditError {
    /// The value to set is not one JSON value.
    #[error("the value to set for member {0:?} is not valid JSON")]
    InvalidValue(Box<str>),
    /// One list of edits names a member twice.
    #[error("member {0:?} is edited more than once")]
    EditedTwice(Box<str>),
}

impl Edits {
    /// Adds: the member gets `value`, a JSON text. Where it is absent it is appended behind the others, in the order of
    /// the edits.
    pub fn set(&mut self, name: &str, value: &[u8]) -> Result<(), EditError> {
        if !is_json(value) {
            return Err(EditError::InvalidValue(name.into()));
        }
        let mut member = Vec::with_capacity(name.len() + value.len() + 3);
        text::quote(name, &mut member);
        member.push(b':');
        let start = member.len();
        member.extend_from_slice(value);
        self.add(
            name,
            Action::Set {
                member: member.into(),
                value: start,
            },
        )
    }

    /// Adds: the member is taken out where it is there.
    pub fn drop(&mut self, name: &str) -> Result<(), EditError> {
        self.add(name, Action::Drop)
    }

    fn add(&mut self, name: &str, action: Action) -> Result<(), EditError> {
        if self.find(name.as_bytes()).is_some() {
            return Err(EditError::EditedTwice(name.into()));
        }
        self.0.push(Edit {
            name: name.into(),
            action,
        });
        Ok(())
    }

    fn find(&self, name: &[u8]) -> Option<&Action> {
        self.0
            .iter()
            .find(|edit| edit.name.as_bytes() == name)
            .map(|edit| &edit.action)
    }
}

/// An edited body, as the pieces it is made of: most of them lie in the body it came from.
#[derive(Debug)]
pub struct Splice<'a> {
    text: &'a [u8],
    pieces: Vec<&'a [u8]>,
    /// Start of the text that is not in `pieces` yet.
    from: usize,
}

impl<'a> Splice<'a> {
    fn new(text: &'a [u8]) -> Self {
        Self {
            text,
            pieces: Vec::with_capacity(16),
            from: 0,
        }
    }

    fn replace(&mut self, span: Range<usize>, with: &'a [u8]) {
        self.pieces
            .extend([&self.text[self.from..span.start], with]);
        self.from = span.end;
    }

    /// Length in bytes of the edited body.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }

    /// Whether the edited body has no bytes. It always has some: an object keeps its braces.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the edited body.
    ///
    /// # Panics
    /// When `out` has another length than [`len`](Self::len).
    pub fn write(&self, out: &mut [u8]) {
        let mut rest = out;
        for piece in &self.pieces {
            let (head, tail) = rest.split_at_mut(piece.len());
            head.copy_from_slice(piece);
            rest = tail;
        }
        assert!(
            rest.is_empty(),
            "the buffer has the length of the edited body"
        );
    }

    /// The edited body in bytes of its own.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.pieces.concat()
    }
}

impl<B: AsRef<[u8]>> Body<B> {
    /// Applies `edits`, and `over` in place of them where both name a member. `None` when that changes nothing.
    ///
    /// A member that is dropped takes one comma along, and the space between it and that comma's other side; of a
    /// member that is set only the value changes. An unowned member that is there more than once is edited everywhere.
    #[must_use]
    pub fn splice<'a>(&'a self, edits: &'a Edits, over: &'a Edits) -> Option<Splice<'a>> {
        let text = self.bytes();
        let find = |name: &[u8]| over.find(name).or_else(|| edits.find(name));
        let mut splice = Splice::new(text);
        let mut any_kept = false;
        for (index, member) in self.members.iter().enumerate() {
            match find(member.name.bytes(text)) {
                Some(Action::Drop) => {
                    // Behind a member that stays the comma before goes, else the one behind: both ends stay right.
                    let span = if any_kept {
                        self.members[index - 1].value.end..member.value.end
                    } else {
                        let next = self.members.get(index + 1);
                        member.start..next.map_or(member.value.end, |next| next.start)
                    };
                    splice.replace(span, b"");
                    continue;
                }
                Some(Action::Set {
                    member: text,
                    value,
                }) if self.text(member) != &text[*value..] => {
                    splice.replace(member.value.clone(), &text[*value..]);
                }
                _ => {}
            }
            any_kept = true;
        }
        let kept_edits = edits
            .0
            .iter()
            .filter(|edit| over.find(edit.name.as_bytes()).is_none());
        for edit in kept_edits.chain(&over.0) {
            let Action::Set { member, .. } = &edit.action else {
                continue;
            };
            if self.member(&edit.name).is_none() {
                splice.replace(self.close..self.close, if any_kept { b"," } else { b"" });
                splice.pieces.push(member);
                any_kept = true;
            }
        }
        if splice.pieces.is_empty() {
            return None;
        }
        splice.pieces.push(&text[splice.from..]);
        Some(splice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(set: &[(&str, &str)], drop: &[&str]) -> Edits {
        let mut edits = Edits::default();
        for (name, value) in set {
            edits.set(name, value.as_bytes()).unwrap();
        }
        for name in drop {
            edits.drop(name).unwrap();
        }
        edits
    }

    fn spliced(text: &str, edits: &Edits, over: &Edits) -> Option<String> {
        let body = Body::scan(text).unwrap();
        let splice = body.splice(edits, over)?;
        let mut out = vec![0; splice.len()];
        splice.write(&mut out);
        assert_eq!(out, splice.to_vec());
        Some(String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_dropped_member_takes_its_comma_along_wherever_it_stands() {
        let edits = edits(&[], &["x", "y"]);
        for (before, after) in [
            (r#"{"x":1,"a":2,"b":3}"#, r#"{"a":2,"b":3}"#),
            (r#"{"a":2,"x":1,"b":3}"#, r#"{"a":2,"b":3}"#),
            (r#"{"a":2,"b":3,"x":1}"#, r#"{"a":2,"b":3}"#),
            (r#"{"x":1}"#, "{}"),
            (r#"{"x":1,"y":2}"#, "{}"),
            (r#"{"x":1,"y":2,"a":3}"#, r#"{"a":3}"#),
            (r#"{"a":3,"x":1,"y":2}"#, r#"{"a":3}"#),
            (r#"{"x":1,"a":3,"y":2}"#, r#"{"a":3}"#),
            (r#"{"x":1,"a":3,"x":[2]}"#, r#"{"a":3}"#),
            (r#"{"\u0078":1,"a":3}"#, r#"{"a":3}"#),
            ("{ \"x\" : 1 }", "{  }"),
            ("{ \"x\" : 1 , \"a\" : 2 }", "{ \"a\" : 2 }"),
            ("{\n  \"a\": 2,\n  \"x\": 1\n}\n", "{\n  \"a\": 2\n}\n"),
            (
                "{\n  \"a\": 2,\n  \"x\": 1,\n  \"b\": 3\n}",
                "{\n  \"a\": 2,\n  \"b\": 3\n}",
            ),
        ] {
            assert_eq!(
                spliced(before, &edits, &Edits::default()).as_deref(),
                Some(after),
                "{before}"
            );
        }
    }

    #[test]
    fn a_member_that_is_set_is_replaced_in_place_or_appended() {
        let edits = edits(&[("stream", "false"), ("max_tokens", "1")], &[]);
        for (before, after) in [
            (
                r#"{"stream": true ,"max_tokens":99}"#,
                r#"{"stream": false ,"max_tokens":1}"#,
            ),
            (
                r#"{"stream":false,"max_tokens":2}"#,
                r#"{"stream":false,"max_tokens":1}"#,
            ),
            ("{}", r#"{"stream":false,"max_tokens":1}"#),
            ("{ }", r#"{ "stream":false,"max_tokens":1}"#),
            (r#"{"a":1} "#, r#"{"a":1,"stream":false,"max_tokens":1} "#),
            (
                r#"{"max_tokens":[],"a":{"stream":true}}"#,
                r#"{"max_tokens":1,"a":{"stream":true},"stream":false}"#,
            ),
        ] {
            assert_eq!(
                spliced(before, &edits, &Edits::default()).as_deref(),
                Some(after),
                "{before}"
            );
        }
    }

    #[test]
    fn edits_of_a_request_go_over_the_compiled_ones() {
        let compiled = edits(&[("a", "1"), ("b", "2")], &["c", "d"]);
        let request = edits(&[("c", "3"), ("e", "5")], &["a"]);
        let after = spliced(r#"{"a":0,"c":0,"d":0,"z":0}"#, &compiled, &request);
        assert_eq!(after.as_deref(), Some(r#"{"c":3,"z":0,"b":2,"e":5}"#));
        assert_eq!(
            spliced(r#"{"d":0}"#, &compiled, &request).as_deref(),
            Some(r#"{"b":2,"c":3,"e":5}"#)
        );
    }

    #[test]
    fn edits_that_change_nothing_give_nothing() {
        let edits = edits(&[("n", "1")], &["absent"]);
        assert_eq!(spliced(r#"{ "n" : 1 }"#, &edits, &Edits::default()), None);
        assert_eq!(spliced("{}", &Edits::default(), &Edits::default()), None);
    }

    #[test]
    fn edits_that_say_nothing_or_two_things_are_refused() {
        let mut edits = Edits::default();
        for value in ["", "nul", "1 2", "{", "[1,]", "\"\n\""] {
            assert_eq!(
                edits.set("a", value.as_bytes()),
                Err(EditError::InvalidValue("a".into())),
                "{value}"
            );
        }
        edits.set("a", b"1").unwrap();
        assert_eq!(edits.drop("a"), Err(EditError::EditedTwice("a".into())));
    }
}
