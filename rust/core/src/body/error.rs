//! Why a request body is refused: a kind for programs, an offset and a sentence for people.

use thiserror::Error;

/// A request body that the gateway cannot take, and where it went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind}, at byte {offset}")]
pub struct BodyError {
    /// What is wrong.
    pub kind: ErrorKind,
    /// Offset in bytes from the start of the body at which it shows.
    pub offset: usize,
}

/// The kinds of [`BodyError`]. Their [`code`](ErrorKind::code) is stable, their sentence is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ErrorKind {
    /// The text breaks the grammar of RFC 8259.
    #[error("the body is not valid JSON: {0}")]
    NotJson(&'static str),
    /// A JSON text whose top level is something else than an object.
    #[error("the body must be a JSON object")]
    NotAnObject,
    /// An owned member is there twice. The engine would read the last, others read the first: nobody may choose.
    #[error("member {0:?} is there more than once")]
    DuplicateMember(&'static str),
    /// Arrays and objects nest deeper than [`MAX_DEPTH`](super::MAX_DEPTH).
    #[error("the body nests deeper than {} levels", super::MAX_DEPTH)]
    TooDeep,
    /// More than [`MAX_MEMBERS`](super::MAX_MEMBERS) members at the top.
    #[error("the body has more than {} members", super::MAX_MEMBERS)]
    TooManyMembers,
    /// Bytes that are not UTF-8, which RFC 8259 section 8.1 asks for.
    #[error("the body is not valid UTF-8")]
    InvalidUtf8,
    /// A member by which the gateway must decide has a value it cannot decide by.
    #[error("member {member:?} must be {allowed}")]
    WrongType {
        /// The member's name.
        member: &'static str,
        /// What its value may be, as a phrase.
        allowed: &'static str,
    },
}

impl ErrorKind {
    /// The stable name of the kind, for programs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotJson(_) => "not_json",
            Self::NotAnObject => "not_an_object",
            Self::DuplicateMember(_) => "duplicate_member",
            Self::TooDeep => "too_deep",
            Self::TooManyMembers => "too_many_members",
            Self::InvalidUtf8 => "invalid_utf8",
            Self::WrongType { .. } => "wrong_type",
        }
    }

    /// The top-level member that the error is about, when it is about one.
    #[must_use]
    pub const fn member(&self) -> Option<&'static str> {
        match self {
            Self::DuplicateMember(member) | Self::WrongType { member, .. } => Some(member),
            _ => None,
        }
    }

    pub(super) const fn at(self, offset: usize) -> BodyError {
        BodyError { kind: self, offset }
    }
}
